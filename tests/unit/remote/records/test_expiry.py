"""What is removed of what a host keeps, and when."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distmagic.remote.records import expiry, listing, owners, places
from tests.builders.messages import START

SHA = "0123456789abcdef" * 4
DAY_S = 86400.0
NOW = 2_000_000_000.0


def test_what_goes_while_it_is_measured(home, monkeypatch):
    """The oldest piece of a log goes while its job runs; neither the listing nor the expiry stumbles over that."""
    folder = home / "jobs" / "long" / "0-a"
    folder.mkdir(parents=True)
    (folder / "rank0.stdout.log").write_bytes(b"x" * 7)
    piece = folder / "rank0.stdout.log.100"

    def going(real: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def lstat(path: str | Path, **more: Any) -> os.stat_result:
            if str(path) == str(piece):
                piece.unlink(missing_ok=True)
            return real(path, **more)

        return lstat

    for module in (Path, os):
        monkeypatch.setattr(module, "lstat", going(module.lstat))
    piece.write_bytes(b"x" * 7)
    assert places.size_below(folder) == 7
    piece.write_bytes(b"x" * 7)
    expiry.expire(time.time() + 8 * DAY_S)
    assert not (home / "jobs" / "long").exists()


def make(path: Path, age_s: float, size: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    for each in (path, *path.parents):
        if each.name in ("home", "jobs", "blobs"):
            break
        os.utime(each, (NOW - age_s, NOW - age_s))
    return path


def test_nothing_there(home):
    expiry.expire(NOW)
    assert not home.exists()


def test_what_is_old_goes(home):
    old, young = (
        make(home / "blobs" / SHA, 8 * DAY_S),
        make(home / "blobs" / SHA[::-1], 6 * DAY_S),
    )
    job = make(home / "jobs" / "old" / "0-a" / "rank0.stdout.log", 8 * DAY_S)
    expiry.expire(NOW)
    assert (old.exists(), young.exists(), job.parent.parent.exists()) == (
        False,
        True,
        False,
    )
    assert (home / "jobs").is_dir()


def test_files_that_were_never_finished_go_soon(home):
    old, young, whole = (
        make(home / "blobs" / name, age_s)
        for name, age_s in (
            (f"{SHA}.abc", 3700.0),
            (f"{SHA}.def", 3500.0),
            (SHA, 3700.0),
        )
    )
    expiry.expire(NOW)
    assert (old.exists(), young.exists(), whole.exists()) == (False, True, True)


def test_a_job_whose_journal_is_touched_stays(home):
    log = make(home / "jobs" / "long" / "0-a" / "rank0.stdout.log", 30 * DAY_S)
    journal = make(home / "jobs" / "long" / "1-b" / "journal.jsonl", 30 * DAY_S)
    blob = make(home / "blobs" / SHA, 30 * DAY_S)
    for path in (log, log.parent, log.parent.parent, journal, journal.parent, blob):
        os.utime(path, (1, 1))
    places.touch((home / "gone", str(journal), blob))
    expiry.expire(places.now_at(home))
    assert log.exists()
    assert blob.exists()


def test_beyond_its_size_the_oldest_go_first(home, monkeypatch):
    monkeypatch.setattr(expiry, "KEPT_BYTES", 250)
    blobs = [make(home / "blobs" / (str(i) * 64), 3600.0 * i, 100) for i in range(1, 5)]
    expiry.expire(NOW)
    assert [blob.exists() for blob in blobs] == [True, True, False, False]


def test_what_may_be_in_use_stays_however_large(home, monkeypatch):
    monkeypatch.setattr(expiry, "KEPT_BYTES", 0)
    blob, old = make(home / "blobs" / "new", 10.0), make(home / "blobs" / "old", 400.0)
    expiry.expire(NOW)
    assert (blob.exists(), old.exists()) == (True, False)


def make_job(home: Path, name: str, age_s: float, *, fetched: bool = True) -> Path:
    """Make a job of 200,000 bytes and a little more, half of it a result."""
    folder = home / "jobs" / name / "0-a"
    make(folder / "rank0.stdout.log", age_s, 100_000)
    result = make(folder / "rank0.result", age_s, 100_000)
    if fetched:
        expiry.mark_fetched(result)
        make(result.with_name("rank0.result.fetched"), age_s, 0)
    return folder.parent


def test_results_that_nobody_has_fetched_do_not_count_nor_does_the_newest_job(
    home, monkeypatch
):
    """A job is over in the night, its results are large, and another contact comes before its user does."""
    monkeypatch.setattr(expiry, "KEPT_BYTES", 300_000)
    newest = make_job(home, "newest", 3600.0)
    second, third, fourth = (
        make_job(home, f"fetched{n}", 3600.0 * n) for n in (2, 3, 4)
    )
    unfetched = make_job(home, "unfetched", 3600.0 * 5, fetched=False)
    old = make_job(home, "old", 8 * DAY_S, fetched=False)
    expiry.expire(NOW)
    assert [job.exists() for job in (newest, second, third, fourth)] == [
        True,
        True,
        False,
        False,
    ]
    assert (unfetched.exists(), old.exists()) == (True, False)


def test_on_a_full_disk_unfetched_results_count_too_but_for_the_newest_job(
    home, monkeypatch
):
    monkeypatch.setattr(expiry, "KEPT_BYTES", 100_000)
    monkeypatch.setattr(places, "FULL_BYTES", 1 << 62)
    newest, other = (
        make_job(home, f"job{n}", 3600.0 * n, fetched=False) for n in (1, 2)
    )
    expiry.expire(NOW)
    assert (newest.exists(), other.exists()) == (True, False)


def begun_by(owner: str, job: Path, age_s: float) -> Path:
    """Have a job's folder say who began it."""
    listing.remember(
        job / "0-a",
        replace(START, job=job.name, terms=replace(START.terms, owner=owner)),
    )
    for path in (job / "0-a" / listing.FILE, job / "0-a", job):
        os.utime(path, (NOW - age_s, NOW - age_s))
    return job


@pytest.mark.parametrize(
    "full_bytes", [0, 1 << 62], ids=["a disk with room", "a full disk"]
)
def test_nobody_pushes_out_what_another_one_began(home, monkeypatch, full_bytes):
    """Several people work as one user of a host."""
    monkeypatch.setattr(expiry, "KEPT_BYTES", 300_000)
    monkeypatch.setattr(places, "FULL_BYTES", full_bytes)
    mine = [
        begun_by("me@a:/x.ipynb", make_job(home, f"mine{n}", 3600.0 * n), 3600.0 * n)
        for n in (1, 2, 3, 4)
    ]
    hers = begun_by("she@b:/x.ipynb", make_job(home, "hers", 3600.0 * 9), 3600.0 * 9)
    old = begun_by("she@b:/x.ipynb", make_job(home, "old", 8 * DAY_S), 8 * DAY_S)
    expiry.expire(NOW)
    assert [job.exists() for job in mine] == [True, True, False, False]
    assert (hers.exists(), old.exists()) == (True, False)


@pytest.mark.parametrize(("name", "is_one"), [
    ("me@a:train.py (process {}-abcdef)", True), ("me@a:notebook (kernel {})", True), ("me@a:/Untitled ({}).ipynb", False),
])  # fmt: skip
def test_the_runs_of_one_script_are_kept_as_those_of_one_owner(
    home, monkeypatch, name, is_one
):
    monkeypatch.setattr(expiry, "KEPT_BYTES", 100_000)
    jobs = [
        begun_by(name.format(n), make_job(home, f"job{n}", 3600.0 * n), 3600.0 * n)
        for n in (1, 2)
    ]
    expiry.expire(NOW)
    assert [job.exists() for job in jobs] == [True, not is_one]


def test_a_payload_that_is_still_arriving_is_kept_whatever_its_size(home, monkeypatch):
    monkeypatch.setattr(expiry, "KEPT_BYTES", 150)
    whole = [make(home / "blobs" / (letter * 64), 400.0, 100) for letter in "ab"]
    arriving = make(home / "blobs" / f".{SHA}.0123456789ab", 10.0, 100)
    expiry.expire(NOW)
    assert [blob.exists() for blob in whole] == [True, True]
    arriving.unlink()
    expiry.expire(NOW)
    assert [blob.exists() for blob in whole].count(True) == 1


def test_on_a_slow_disk_it_comes_to_an_end(home, monkeypatch):
    old = make(home / "blobs" / SHA, 8 * DAY_S)
    monkeypatch.setattr(expiry, "_LOOK_S", -1.0)
    expiry.expire(NOW)
    assert old.exists(), "next time"


def test_links_are_not_followed(home, tmp_path):
    outside = make(tmp_path / "outside" / "precious", 100 * DAY_S)
    (home / "jobs").mkdir(parents=True)
    link = home / "jobs" / "link"
    link.symlink_to(outside.parent)
    os.utime(link, (NOW - 100 * DAY_S,) * 2, follow_symlinks=False)
    expiry.expire(NOW)
    assert outside.exists()
    assert not os.path.lexists(link)


def test_what_can_not_be_removed_makes_no_run_fail(home, monkeypatch):
    blob = make(home / "blobs" / "stuck", 100 * DAY_S)
    log = make(home / "jobs" / "stuck" / "0-a" / "log", 100 * DAY_S)
    refused = []

    def refuse(path, **more):
        refused.append(path)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(expiry.shutil, "rmtree", refuse)
    expiry.expire(NOW)
    assert refused == [home / "jobs" / "stuck", blob]
    assert log.exists()


def test_what_goes_at_the_same_time_makes_no_run_fail(home, monkeypatch):
    make(home / "blobs" / "there", 100 * DAY_S)
    old = make(home / "blobs" / "other", 100 * DAY_S)
    real, looked = os.lstat, []

    def gone(path, **more):
        if Path(path).name == "there":
            looked.append(Path(path))
            raise FileNotFoundError(2, "No such file or directory")
        return real(path, **more)

    monkeypatch.setattr(os, "lstat", gone)
    expiry.expire(NOW)
    assert looked == [home / "blobs" / "there"]
    monkeypatch.undo()
    assert not old.exists()


@pytest.mark.slow
def test_a_kernel_that_looks_at_ten_thousand_blobs_holds_half_a_kilobyte_of_each(home):
    """It does so once a minute; what it takes for that in passing may stay with its process."""
    (home / "blobs").mkdir(parents=True)
    for number in range(10_000):
        (home / "blobs" / f"{number:064x}").touch()
    tracemalloc.start()
    try:
        expiry.expire(places.now_at(home))
        assert tracemalloc.get_traced_memory()[1] < 10_000 * 512
    finally:
        tracemalloc.stop()


@pytest.fixture
def expired(tmp_path, monkeypatch) -> list[float]:
    """The times at which what was old then was removed."""
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    found: list[float] = []
    monkeypatch.setattr(expiry, "expire", found.append)
    return found


def here(days_ago: float, name: str = "tidied") -> None:
    """Have the last contact, or the last return, so long ago."""
    (places.home() / name).touch()
    os.utime(places.home() / name, times=(time.time() - days_ago * DAY_S,) * 2)


def test_it_is_tidied_at_most_once_a_minute(tmp_path, expired):
    expiry.tidy()  # there is no home yet
    (tmp_path / "home").mkdir()
    here(0.5)
    expiry.tidy()
    expiry.tidy()
    assert len(expired) == 1
    stamp = tmp_path / "home" / "tidied"
    for age_days in (61 / DAY_S, -0.5):  # the second: its clock was put back since
        here(age_days)
        expiry.tidy()
    assert len(expired) == 3
    stamp.unlink()
    expiry.tidy()
    assert stamp.stat().st_mode & 0o777 == 0o600


def test_who_comes_back_after_a_holiday_has_a_day_to_fetch_what_grew_old(
    tmp_path, expired
):
    (tmp_path / "home").mkdir()
    expiry.tidy()
    assert expired.pop() > 0, "on a new host nothing grew old, and its size is bounded"
    here(9.0)
    expiry.tidy()
    assert expired == [0.0], "nothing: nobody is known to have been here before"
    for days_ago in (0.1, 0.9):
        here(0.01)
        here(days_ago, "came-back")
        expiry.tidy()
    assert expired == [0.0]
    here(0.01)
    here(1.1, "came-back")
    expiry.tidy()
    assert expired[1:] == [pytest.approx(time.time(), abs=60)]


def test_who_comes_seldom_finds_what_the_visit_before_could_have_fetched_gone(
    tmp_path, expired
):
    (tmp_path / "home").mkdir()
    here(9.0)
    here(18.0, "came-back")
    expiry.tidy()
    assert expired == [pytest.approx(time.time() - 18 * DAY_S, abs=60)]


@pytest.mark.parametrize("has_stamp", [True, False])
def test_a_contact_after_a_holiday_removes_nothing_that_it_came_for(home, has_stamp):
    job = make(home / "jobs" / "j" / "0-a" / "rank0.result", 0.0)
    for path in (job, job.parent, job.parent.parent):
        os.utime(path, (time.time() - 12 * DAY_S,) * 2)
    if has_stamp:
        here(11.0)
    else:
        os.utime(home / "jobs", (time.time() - 12 * DAY_S,) * 2)
    expiry.tidy()
    assert job.exists()
    here(0.01)
    here(1.1, "came-back")
    expiry.tidy()
    assert not job.exists()


def test_what_nobody_uses_of_what_was_sent(home):
    old, own = (make(home / "blobs" / name, 600.0, 100) for name in (SHA, "b" * 64))
    make(home / "blobs" / ("c" * 64), 30.0, 100)  # touched by an agent that lives
    assert expiry.unused(own.name, NOW) == [(old, 100)]
    arriving = make(home / "blobs" / f".{SHA}.0123456789ab", 10.0, 100)
    # Of another notebook's payload, whose first files are old by now.
    assert expiry.unused(own.name, NOW) == []
    arriving.unlink()
    expiry.remove([old, home / "gone"])
    assert (old.exists(), own.exists()) == (False, True)


def test_variables_of_setups_are_kept_for_a_week_or_removed_at_once(home):
    for name, age_s in (("new", 6 * DAY_S), ("old", 8 * DAY_S)):
        make(home / "setup" / name, age_s, 5)
    make(home / "setup" / ".lock", 0.0)
    expiry.expire(NOW)
    found = expiry.unused("bundle", NOW)
    assert found == [(home / "setup" / "new", 5)]
    expiry.remove(path for path, _ in found)
    assert [path.name for path in (home / "setup").iterdir()] == [".lock"]


NEW, OLD = f".{'a' * 16}", f".{'b' * 16}"


def test_for_one_owner_only_what_nobody_else_has_made_or_asked_for(home):
    now = time.time()
    sent = make(home / "blobs" / SHA, 0.0, 100)
    os.utime(sent, (now - 600.0, now - 600.0))
    make(home / "setup" / "one", 0.0, 5)
    own, shared, unknown = [home / "envs" / f".{char * 16}" for char in "abc"]
    for folder, asking in ((own, ["me"]), (shared, ["me", "you"]), (unknown, [])):
        folder.mkdir(parents=True)
        for owner in asking:
            owners.note(folder, owner)
        os.utime(folder, (now - 600.0, now - 600.0))
    assert [path for path, _ in expiry.unused("bundle", now, "me")] == [sent, own]
    everybody = [path for path, _ in expiry.unused("bundle", now)]
    assert sorted(everybody) == sorted([sent, own, shared, unknown, home / "setup" / "one"])  # fmt: skip


def test_an_environment_that_nobody_has_used_for_a_week_goes(home):
    now = time.time()
    for name, age_s in ((NEW, 6 * DAY_S), (OLD, 8 * DAY_S)):
        folder = home / "envs" / name
        folder.mkdir(parents=True)
        os.utime(folder, (now - age_s, now - age_s))
        (home / "envs" / name.strip(".")).symlink_to(name)
    expiry.expire(now)
    left = sorted(path.name for path in (home / "envs").iterdir())
    assert left == [NEW, "a" * 16]


@pytest.mark.parametrize("ahead_s", [-8 * DAY_S, 8 * DAY_S])
def test_the_own_clock_says_nothing_of_what_another_host_of_the_home_uses(
    home, monkeypatch, ahead_s
):
    """It has just touched its environment and a blob; files are dated by the server of the home."""
    environment, blob = home / "envs" / NEW, home / "blobs" / SHA
    for path in (environment, blob.parent):
        path.mkdir(parents=True)
    blob.touch()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    expiry.expire(places.now_at(home))
    assert expiry.unused("bundle", places.now_at(home)) == []
    expiry.remove([environment])
    assert environment.is_dir()
    assert blob.exists()
