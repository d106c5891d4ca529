"""Files that appear whole or not at all."""

from __future__ import annotations

import os

import pytest

from distmagic.remote.records.atomic_file import atomic_write


def test_a_file_appears_whole_and_private(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_what_breaks_off_changes_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write() -> None:
        with atomic_write(path) as file:
            file.write(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_write_the_same_file_at_the_same_time(tmp_path):
    path = tmp_path / "file"
    with atomic_write(path) as first:
        with atomic_write(path) as second:
            second.write(b"second")
        first.write(b"first")
    assert path.read_text() == "first"


def test_what_is_written_without_a_buffer_can_be_read_at_once(tmp_path):
    with atomic_write(tmp_path / "file", is_buffered=False) as file:
        file.write(b"abc")
        file.seek(0)
        assert file.read(3) == b"abc"


@pytest.mark.parametrize(
    "name",
    ["x" * 255, "\u8bad" * 85, "\U0001f525" * 63, os.fsdecode(b"\xff" * 255)],
    ids=["ASCII", "Chinese", "emoji", "no UTF-8"],
)
def test_a_name_may_be_as_long_as_a_name_can_be(tmp_path, name):
    with atomic_write(tmp_path / name) as file:
        file.write(b"new")
    assert (tmp_path / name).read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_name_of_a_blob_can_be_read_while_it_is_written(tmp_path):
    with atomic_write(tmp_path / ("ab" * 32)):
        (aside,) = tmp_path.iterdir()
        assert aside.name.startswith(f".{'ab' * 32}.")
