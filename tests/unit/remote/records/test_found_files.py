"""Files that ranks left: found by a pattern, read without a link, digested while they change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distmagic.remote.records import found_files
from distmagic.remote.records.found_files import find, opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    for name in ("a.pt", "b.txt", "ck/a.pt", "ck/deep/c.pt", "[x].pt", ".hidden"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(name)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.pt").write_text("")
    (made / "link").symlink_to(outside)
    (made / "file_link.pt").symlink_to(outside / "secret.pt")
    (made / "loop").symlink_to(made)
    os.mkfifo(made / "pipe.pt")
    return made


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("*.pt", ["[x].pt", "a.pt"]),
        ("./a.pt", ["a.pt"]),
        ("ck/*", ["ck/a.pt"]),
        ("**/*.pt", ["[x].pt", "a.pt", "ck/a.pt", "ck/deep/c.pt"]),
        ("ck/**", ["ck/a.pt", "ck/deep/c.pt"]),
        ("ck", ["ck/a.pt", "ck/deep/c.pt"]),
        ("[x].pt", ["[x].pt"]),
        ("ck/deep/", ["ck/deep/c.pt"]),
        ("link", []),
        ("**/deep/?.pt", ["ck/deep/c.pt"]),
        ("[ab].*", ["a.pt", "b.txt"]),
        ("**", [".hidden", "[x].pt", "a.pt", "b.txt", "ck/a.pt", "ck/deep/c.pt"]),
        ("link/*", []),
        ("nothing", []),
    ],
)
def test_a_pattern_finds_files_and_no_links(folder, pattern, paths):
    assert [file.path for file in find(str(folder), pattern)] == paths


def test_what_is_told_of_a_file(folder):
    os.utime(folder / "a.pt", (7, 7.5))
    (found,) = find(str(folder), "a.pt")
    assert (found.size_bytes, found.changed_s) == (4, 7.5)


def test_too_many_files_are_refused(folder, monkeypatch, golden):
    monkeypatch.setattr(found_files, "MOST_FILES", 1)
    with golden.raises(ValueError):
        find(str(folder), "**")


@pytest.mark.parametrize(
    "path",
    ["../outside/secret.pt", "/etc/passwd", "", "ck/../../outside/secret.pt", "a\0b"],
)
def test_a_path_that_leads_out_is_refused(folder, path, golden):
    with golden.raises(ValueError):
        opened(str(folder), path)


def test_links_and_pipes_are_not_read(folder, golden):
    with golden.raises(ValueError):
        opened(str(folder), "link/secret.pt")
    with pytest.raises(OSError, match="symbolic links"):
        opened(str(folder), "file_link.pt")
    with golden.raises(ValueError):
        opened(str(folder), "pipe.pt")
    with opened(str(folder), "loop/ck/a.pt") as file:
        assert file.read() == b"ck/a.pt", "a link that stays inside leads nowhere else"


def test_a_part_of_a_file_is_digested(folder):
    with opened(str(folder), "ck/deep/c.pt") as file:
        assert b"".join(found_files.pieces(file, 3, 100)) == b"deep/c.pt"
        whole, twice = found_files.digest(file, 0, 12), found_files.digest(file, 0, 99)
        assert whole == twice != found_files.digest(file, 1, 12)
