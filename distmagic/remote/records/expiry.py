"""Removes files from a host: those that are old, and the oldest ones if there are many.

Only a contact does this, after its first answer, at most once a minute.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from distmagic.remote.frozen import frozen
from distmagic.remote.records import environments, listing, places, work_dirs

KEPT_DAYS = 7.0
_KEPT_S = KEPT_DAYS * 86400
KEPT_BYTES = 2 << 30  # limit for all jobs of one owner, and again for all blobs
_PARTIAL_S = 3600.0
_TIDY_S = 60.0
_SETTLED_S = 86400.0  # time after an owner has come back
# Files whose dates record the last contact, and the last return after a long absence.
_HERE, _CAME_BACK = "tidied", "came-back"
_TOUCHED_S = 120.0  # agents and templates touch their files four times in that time
_YOUNG_S = 300.0  # files that changed this recently may be in use
# Time limit for jobs, and again for blobs: a notebook waits for its answer meanwhile.
_LOOK_S = 5.0
_FETCHED = ".fetched"  # marker file next to a result


def tidy() -> None:
    """Call `expire`, but at most once a minute: it checks every file, which is slow if there are
    many.

    A user who returns after a long absence, or after a clock jump, has a day to fetch old results.
    Until then only those files are removed that were already old at the previous return. Raises
    OSError.
    """
    home = places.home()
    if not home.is_dir():
        return
    now = places.now_at(home)
    # Without the first file: a user last used this host when the latest job started.
    was_here_s = places.changed_s(home / _HERE) or places.changed_s(home / "jobs")
    came_back_s = places.changed_s(home / _CAME_BACK)
    if 0 <= now - was_here_s < _TIDY_S:
        return
    was_away = 0 < was_here_s < now - _KEPT_S
    for stamp in (_HERE, _CAME_BACK) if was_away else (_HERE,):
        with suppress(OSError):  # no space
            (home / stamp).touch(mode=0o600)
    if was_away:
        expire(came_back_s)
    elif now - came_back_s > _SETTLED_S:
        expire(now)


def expire(now: float) -> None:
    """Remove jobs and blobs that are older than `KEPT_DAYS` or exceed `KEPT_BYTES`, oldest first.

    A running job is kept, with the files it came from: its agent touches them. The size limit
    applies to the jobs of one owner: files of one notebook or script never displace those of
    another. The owner's newest job does not count, and neither does a job with unfetched results,
    unless the disk is full. On a slow disk not everything is checked each time. A working directory
    or an environment is kept as long as a job uses it, and `KEPT_DAYS` longer. `now` is the time by
    the clock that dates the files.
    """
    _expire_jobs(now)
    folder = places.home() / "blobs"
    blobs = _entries(folder)
    is_receiving = _is_receiving(blobs, now)
    kept_bytes = 0
    for blob in blobs:
        kept_bytes += blob.size_bytes
        age_s = now - blob.changed_s
        is_partial = len(blob.name) != 64  # the process that wrote it was killed
        is_old = age_s > (_PARTIAL_S if is_partial else _KEPT_S)
        is_beyond = kept_bytes > KEPT_BYTES and age_s > _YOUNG_S and not is_receiving
        if is_old or is_beyond:
            _remove(folder / blob.name)
    work_dirs.expire(now, _KEPT_S)
    remove(path for path, _ in environments.unused(_KEPT_S, now))
    for path in (places.home() / "setup").glob("*"):
        with suppress(OSError):
            if now - path.stat().st_mtime > _KEPT_S:
                path.unlink()


def _expire_jobs(now: float) -> None:
    folder = places.home() / "jobs"
    jobs = _entries(folder)
    is_full = bool(jobs) and shutil.disk_usage(places.home()).free < places.FULL_BYTES
    kept_bytes: dict[str, int] = {}  # by owner
    for job in jobs:
        age_s = now - job.changed_s
        if age_s > _KEPT_S:
            _remove(folder / job.name)
            continue
        owner = listing.kept_for(folder / job.name)
        is_newest = owner not in kept_bytes
        kept_bytes.setdefault(owner, 0)
        if is_newest or (job.has_unfetched_results and not is_full):
            continue
        kept_bytes[owner] += job.size_bytes
        if kept_bytes[owner] > KEPT_BYTES and age_s > _YOUNG_S:
            _remove(folder / job.name)


def _is_receiving(blobs: Iterable[_Entry], now: float) -> bool:
    """Whether a payload is arriving now: its first blobs get old while the last ones arrive."""
    for blob in blobs:
        sha256, dot, _ = blob.name.strip(".").partition(".")
        if dot and places.is_sha256(sha256) and now - blob.changed_s <= _YOUNG_S:
            return True
    return False


def mark_fetched(result: Path) -> None:
    """Record that a notebook has received a whole result. Errors of the disk are ignored."""
    with suppress(OSError):
        result.with_name(result.name + _FETCHED).touch(mode=0o600)


def unused(bundle: str, now: float, owner: str = "") -> list[tuple[Path, int]]:
    """Return unused blobs and environments, and the saved variables of setups, with their bytes.

    Excluded are this bundle and files that a living process touches. With an `owner`, only
    environments that no other owner has requested, and no variables, whose owner is unknown.
    Missing blobs are sent again.

    Returns nothing while any payload is arriving on this host, because its blobs are not touched by
    a process yet. `now` is as for `expire`.
    """
    folder = places.home() / "blobs"
    entries = _entries(folder)
    if _is_receiving(entries, now):
        return []
    blobs = [
        (folder / entry.name, entry.size_bytes)
        for entry in entries
        if entry.name != bundle and now - entry.changed_s > _TOUCHED_S
    ]
    setups = []
    if not owner:
        for path in (places.home() / "setup").glob("[!.]*"):
            with suppress(FileNotFoundError):
                setups.append((path, path.lstat().st_size))
    return [*blobs, *environments.unused(_TOUCHED_S, now, owner), *setups]


def remove(paths: Iterable[Path]) -> None:
    """Remove files and folders, as far as possible."""
    for path in paths:
        if path.parent == environments.root():
            environments.remove(path)
        else:
            _remove(path)


@frozen
class _Entry:
    """A job's folder, or a blob: its last change, in seconds since 1970, and its size."""

    name: str
    changed_s: float
    size_bytes: int
    has_unfetched_results: bool = False


def _entries(folder: Path) -> list[_Entry]:
    """Return the readable entries of a folder, newest first, as many as the time limit allows.

    A folder may have tens of thousands, and a notebook's kernel also reads its own folder. So names
    are strings: a `Path` takes several times the memory.
    """
    if not folder.is_dir():
        return []
    names = os.listdir(folder)
    # If there is no time for all, each has its turn. The notebook's own generator may have a seed.
    random.Random().shuffle(names)  # noqa: S311  # no secret
    until = time.monotonic() + _LOOK_S
    found = []
    for name in names:
        if time.monotonic() > until:
            break
        # Another contact may remove it at the same time. Files of another user are not removed.
        with suppress(OSError):
            found.append(_entry(str(folder), name))
    return sorted(found, key=lambda entry: entry.changed_s, reverse=True)


def _entry(folder: str, name: str) -> _Entry:
    """Return the entry of a blob, or of a job's folder with all its content. Raises OSError."""
    path = os.path.join(folder, name)
    own = os.lstat(path)
    if not stat.S_ISDIR(own.st_mode):  # a link is not followed
        return _Entry(name=name, changed_s=own.st_mtime, size_bytes=own.st_size)
    changed_s, size_bytes = own.st_mtime, own.st_size
    has_unfetched = False
    for inside, folders, files in os.walk(path):
        there = set(files)
        for one in (*folders, *files):
            try:
                look = os.lstat(os.path.join(inside, one))
            except FileNotFoundError:
                continue  # just removed, like old pieces of a log that is being written
            changed_s = max(changed_s, look.st_mtime)
            size_bytes += look.st_size
            is_result = one.endswith(".result") and look.st_size > 0
            if is_result and one + _FETCHED not in there:
                has_unfetched = True
    return _Entry(
        name=name,
        changed_s=changed_s,
        size_bytes=size_bytes,
        has_unfetched_results=has_unfetched,
    )


def _remove(path: Path) -> None:
    try:
        if stat.S_ISDIR(path.lstat().st_mode):  # a link is not followed
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError:
        return  # already removed, or it can't be removed: no reason to fail a run
