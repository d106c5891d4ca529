"""An export replaces what an export wrote, and nothing else."""

from __future__ import annotations

import pytest

from distmagic.errors import UsageError
from distmagic.exports import folder
from distmagic.exports.job import File


def files(**texts: str) -> list[File]:
    return [
        File(path=path.replace("__", "/"), data=text.encode())
        for path, text in texts.items()
    ]


def test_the_next_export_replaces_the_last_one_and_leaves_the_rest(tmp_path):
    out = tmp_path / "out"
    folder.write(out, files(a="1", old__b="2"))
    (out / "mine.txt").write_text("mine")
    folder.write(out, files(a="3", new__c="4"))
    assert (out / "a").read_text() == "3"
    assert (out / "new/c").read_text() == "4"
    assert not (out / "old").exists()
    assert (out / "mine.txt").read_text() == "mine"


def test_a_private_file_and_one_that_can_be_run(tmp_path):
    given = [
        File(path="p", data=b"", is_private=True),
        File(path="px", data=b"", is_private=True, mode=0o755),
        File(path="x", data=b"", mode=0o755),
        File(path="t", data=b""),
    ]
    folder.write(tmp_path, given)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {
        "p": 0o600,
        "px": 0o700,
        "x": 0o755,
        "t": 0o644,
        folder.RECORD: 0o600,
    }


def test_a_file_that_no_export_wrote_is_in_the_way(tmp_path, golden):
    (tmp_path / "a").write_text("mine")
    with golden.raises(UsageError):
        folder.write(tmp_path, files(b="1", a="2"))
    assert [path.name for path in tmp_path.iterdir()] == ["a"], (
        "nothing is written then"
    )


def test_a_file_that_was_changed_since_is_kept(tmp_path, golden):
    folder.write(tmp_path, files(a="1", b="1"))
    (tmp_path / "a").write_text("edited")
    for again in (files(a="2", b="2"), files(b="2")):
        with golden.raises(UsageError):
            folder.write(tmp_path, again)
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == (
        "edited",
        "1",
    )


def test_a_link_in_the_way_is_not_followed(tmp_path, golden):
    outside = tmp_path / "outside"
    outside.write_text("1")
    out = tmp_path / "out"
    out.mkdir()
    (out / "a").symlink_to(outside)
    with golden.raises(UsageError):
        folder.write(out, files(a="1"))


def test_a_record_that_names_files_elsewhere_removes_none(tmp_path):
    outside = tmp_path / "precious"
    outside.write_text("1")
    out = tmp_path / "out"
    folder.write(out, files(a="1"))
    text = (out / folder.RECORD).read_text()
    digest = text.split('"')[3]
    (out / folder.RECORD).write_text(
        f'{{"a": "{digest}", "../precious": "{digest}", "{outside}": "{digest}"}}'
    )
    folder.write(out, files(a="2"))
    assert outside.read_text() == "1"


@pytest.mark.parametrize("text", ["no json", "[1]"])
def test_a_record_that_is_none(tmp_path, text, golden):
    (tmp_path / folder.RECORD).write_text(text)
    with golden.raises(UsageError):
        folder.write(tmp_path, files(a="1"))


def test_a_folder_that_can_not_be_written(tmp_path, golden):
    (tmp_path / "file").write_text("")
    with golden.raises(UsageError):
        folder.write(tmp_path / "file" / "out", files(a="1"))
