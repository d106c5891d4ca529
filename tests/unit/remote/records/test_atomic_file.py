"""Files that appear whole or not at all."""

from __future__ import annotations

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
