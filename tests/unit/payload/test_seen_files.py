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

# What the date of a file would say if it decided: the time by the clock that dates files.
ALL_OLD, ALL_NEW = math.inf, -math.inf


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
def test_what_was_sent_is_edited_when_it_looks_otherwise(file, date, monkeypatch):
    monkeypatch.setattr(seen_files.places, "now_at", lambda _: date)
    assert not is_edited(file, 2.0)
    edit(file)
    assert is_edited(file, 2.0)


@pytest.mark.parametrize("date", [ALL_OLD, ALL_NEW])
def test_what_a_later_run_has_sent_was_edited_since_an_earlier_one(
    file, date, monkeypatch
):
    monkeypatch.setattr(seen_files.places, "now_at", lambda _: date)
    edit(file)
    contents_of(file.parent)  # at the moment 2
    contents_of(file.parent)
    assert is_edited(file, 1.5)
    assert not is_edited(file, 2.5)


@pytest.mark.parametrize("date", [ALL_OLD, ALL_NEW])
def test_what_a_fetch_has_written_is_edited_when_it_looks_otherwise(
    file, date, monkeypatch
):
    monkeypatch.setattr(seen_files.places, "now_at", lambda _: date)
    edit(file)
    seen_files.fetched(file)
    contents_of(file.parent)
    assert not is_edited(file, 0.5)
    file.unlink()
    assert not is_edited(file, 0.5)
    file.write_text("mine")
    assert is_edited(file, 0.5)


def test_a_link_on_the_way_leads_to_the_file_that_was_sent(file, tmp_path_factory):
    link = tmp_path_factory.mktemp("link") / "project"
    link.symlink_to(file.parent)
    assert not is_edited(link / "train.py", 2.0)
    edit(file)
    assert is_edited(link / "train.py", 2.0)


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_a_file_that_was_never_seen_is_edited_by_the_clock_that_dates_it(
    tmp_path, monkeypatch, ahead_s
):
    """A file server's clock may be apart from this machine's: here it dates files, and is `ahead_s` of it."""
    file = tmp_path / "new.txt"
    file.write_text("")
    made_s = file.stat().st_ctime + ahead_s
    status = os.stat_result((0, 0, 0, 0, 0, 0, 0, 0, 0, made_s))
    monkeypatch.setattr(Path, "lstat", lambda _: status)
    monkeypatch.setattr(seen_files.places, "now_at", lambda _: made_s + 5)
    monkeypatch.setattr(seen_files, "up_s", lambda: 100.0)
    assert is_edited(file, 100.0 - 10)
    assert not is_edited(file, 100.0 - 3)
