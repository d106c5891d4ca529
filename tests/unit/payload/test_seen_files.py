"""A file that somebody has edited since a run began is known, whatever its date says."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import pytest

from distmagic.payload import seen_files
from distmagic.payload.folder import contents_of
from distmagic.payload.seen_files import is_edited

# What the date of a file would say if it decided.
ALL_OLD, ALL_NEW = math.inf, 0.0


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in a folder that a run sends at the moment 1 of a clock that nobody can set."""
    moments = itertools.count(1)
    monkeypatch.setattr(seen_files, "up_s", lambda: float(next(moments)))
    path = tmp_path / "train.py"
    path.write_text("v1")
    assert list(contents_of(tmp_path).files) == ["train.py"]
    return path


def edit(path: Path) -> None:
    """Change a file and keep its length and its date."""
    status = path.stat()
    path.write_text("v2")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize("date", [ALL_OLD, ALL_NEW])
def test_what_was_sent_is_edited_when_it_looks_otherwise(file, date):
    assert not is_edited(file, date, 2.0)
    edit(file)
    assert is_edited(file, date, 2.0)


@pytest.mark.parametrize("date", [ALL_OLD, ALL_NEW])
def test_what_a_later_run_has_sent_was_edited_since_an_earlier_one(file, date):
    edit(file)
    contents_of(file.parent)  # at the moment 2
    contents_of(file.parent)
    assert is_edited(file, date, 1.5)
    assert not is_edited(file, date, 2.5)


@pytest.mark.parametrize("date", [ALL_OLD, ALL_NEW])
def test_what_a_fetch_has_written_is_edited_when_it_looks_otherwise(file, date):
    edit(file)
    seen_files.fetched(file)
    contents_of(file.parent)
    assert not is_edited(file, date, 0.5)
    file.unlink()
    assert not is_edited(file, date, 0.5)
    file.write_text("mine")
    assert is_edited(file, date, 0.5)


def test_a_link_on_the_way_leads_to_the_file_that_was_sent(file, tmp_path_factory):
    link = tmp_path_factory.mktemp("link") / "project"
    link.symlink_to(file.parent)
    assert not is_edited(link / "train.py", ALL_NEW, 2.0)
    edit(file)
    assert is_edited(link / "train.py", ALL_OLD, 2.0)
