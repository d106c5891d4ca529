"""The working directories of runs, which are kept from one run of a name to the next.

    ~/.distmagic/work/NAME/           what ranks find when they begin: files that were brought, and those they wrote
    ~/.distmagic/work/.NAME/          what is known of it
        origin                        the person and the notebook or script that use it; empty for one that a user has named
        owners                        who began the jobs that have used it, a line each
        files.json                    what was brought last, by path, and how each file looked when it was written
        fresh                         the job for which it was emptied last
        users/JOB.NODE.HOST           a job that uses it, since when, and whether its files are there; its agent touches this
                                      file, and removes it
        lock

Homes are often shared between hosts, and a host may run several nodes: all of them may come here at once. So a directory
is looked at and changed under its lock; every file gets its name when it is whole; and the second node of a job finds
that all is there. A directory never changes under a job that runs: another job with other files gets the next one,
NAME-2, NAME-3 and so on. So does a run of another notebook or script, and one that names its directory where this is a
notebook's or a script's own: a directory never becomes another one's.

All times are those of the clock that dates the files, which for a shared home is its server's.

Theory of operation
===================

A directory is in one of four states. Files alone say in which: nothing is kept in memory, and no process owns it.

    absent  there is no NAME; .NAME may still say what is known of one that was removed
    free    NAME is there, and no mark in `users` is alive
    coming  a node of a job has marked it, and brings the job's files
    used    a mark says "ready": all files are there, and only ranks change them

absent, free -> coming: `prepare` marks the first directory of the name that has the run's origin, and only then looks
whether another job uses it. Of two hosts that share no locks one at least sees the other's mark.

coming -> used: every file has its name, `files.json` says what was brought, and the mark says "ready". A further node of
the job finds that mark in whichever directory it is, and brings nothing.

coming -> free: it failed, or was ended. The next run counts as brought what came before an error.

coming -> the next NAME, where another job uses this one and has other files, or this job is to begin with an empty one.
A job with the same files shares the directory.

used -> free: the agent of each node removes its mark. A mark is dead, too, if its agent is gone (on this host, 20 s after
it was made), or if it was not touched for 120 s (on another host).

free -> absent: `remove`, which a user asks for, or `expire`, after 7 days without use.

What becomes of a file in `coming` depends on what it is (work_sync.py):

    listed, and not there                             it is written
    listed, and as it was brought                     it becomes as it is listed
    listed, and a run has written or changed it       it stays, and the run says so
    not listed any more, and as it was brought        it goes, if its place is one of the run's own (`owned`)
    not listed any more, and a run has changed it     it stays
    never brought                                     it stays

With --fresh the directory is emptied before that, once for a job.

Promised: a file appears whole or not at all. Nothing that was brought changes while a job runs. What ranks wrote is
there until --fresh, `remove` or `expire`, whatever happens to the run that follows. A directory never becomes another
notebook's. An error while files are brought costs the next run nothing but time.

Not promised: that two jobs which share a directory keep apart what they write. That a file which was touched, and is
1 MiB or larger, is found to be the same: it counts as changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distmagic.remote.records import listing, owners, places
from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.records.work_sync import FileSync, last_brought
from distmagic.remote.wire.protocol import KeptWorkDir, WorkDir

_SETTLING_S = 20.0  # from the mark of a job to the socket of its agent
_COMING, _READY = "coming", "ready"  # what is in a mark: whether the files are there
_TOUCHED_S = 120.0  # agents touch their mark four times in that time
_NAMED_AT_MOST = 3
_EXPIRE_S = 5.0
_NAME_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A working directory that is ready. `notice` says what a user should know of it, "" for nothing."""

    path: Path
    notice: str = ""


def root() -> Path:
    """Return the directory of all working directories, whether or not it is there."""
    return places.home() / "work"


def prepare(work: WorkDir, job: str, node_rank: int, owner: str = "") -> Prepared:
    """Prepare the working directory of a job's node. Record that the job uses it, and which owner started the job.

    Raises OSError and ValueError.
    """
    places.make_private(root())
    notice = ""
    with _locked(root() / f".{work.name}"):
        directory = None
        for mark in places.matching(root(), f".*/users/{job}.*"):
            # Another node of the same job has made it ready.
            with contextlib.suppress(FileNotFoundError):
                if mark.read_text().endswith(_READY):
                    directory = _Directory(path=root() / mark.parent.parent.name[1:])
        if directory is None:
            directory, notice = _free_directory(work, job, node_rank)
            with _left_where_it_fails(directory.path, job, node_rank):
                directory.belongs_to(work.origin, owner)
                # Else all is there, and nothing may change under the job that runs.
                if not directory.users(job):
                    changed = directory.bring(work, job)
                    notice = "; ".join(
                        text for text in (notice, _in_words(changed)) if text
                    )
        with _left_where_it_fails(directory.path, job, node_rank):
            directory.mark(job, node_rank, _READY)
    if work.inside:
        (directory.path / work.inside).mkdir(parents=True, exist_ok=True)
    return Prepared(path=directory.path, notice=notice)


def touch(path: Path, job: str, node_rank: int) -> None:
    """Note that a job still uses its working directory. Errors of the disk are ignored."""
    with contextlib.suppress(OSError):
        directory = _Directory(path=path)
        places.touch([directory.about])
        directory.mark_of(job, node_rank).touch()  # it may be gone with all the rest


def leave(path: Path, job: str, node_rank: int) -> None:
    """Note that a node of a job no longer uses its working directory. Errors of the disk are ignored."""
    with contextlib.suppress(OSError):
        _Directory(path=path).mark_of(job, node_rank).unlink()


@contextmanager
def _left_where_it_fails(path: Path, job: str, node_rank: int) -> Iterator[None]:
    """Have a node use a working directory no longer where the block raises: the next job need not wait for it."""
    try:
        yield
    except BaseException:
        leave(path, job, node_rank)
        raise


def kept() -> tuple[KeptWorkDir, ...]:
    """Return the working directories of this home, in the order of their names. What can't be read is left out."""
    found = []
    for path in places.matching(root(), "[!.]*"):
        directory = _Directory(path=path)
        with contextlib.suppress(OSError):
            one = KeptWorkDir(
                name=path.name,
                origin=directory.origin or "",
                owners=owners.of(directory.about),
                size_bytes=places.size_below(path),
                age_s=max(0.0, places.now_at(root()) - directory.used_s()),
                is_used=bool(directory.users()),
            )
            found.append(one)
    return tuple(found)


def expire(now: float, kept_s: float) -> None:
    """Remove working directories that no job has used for so long; what takes longer than a few seconds waits for the next time."""
    until = time.monotonic() + _EXPIRE_S
    for path in places.matching(root(), "*"):
        if time.monotonic() > until:
            break  # a notebook waits for its first answer
        with contextlib.suppress(OSError):
            if path.name.startswith("."):
                # What is known of a working directory, which may be gone.
                is_there = places.file_type(path.with_name(path.name[1:]))
                if not is_there and now - path.stat().st_mtime > kept_s:
                    shutil.rmtree(path)
            elif now - _Directory(path=path).used_s() > kept_s:
                remove(path.name)


def remove(name: str) -> int:
    """Remove a working directory that no job uses; return its bytes. Raises OSError if one does."""
    if "/" in name or "\0" in name or name.startswith(".") or not name:
        raise ValueError(f"{name[:80]!r} is not a working directory")
    directory = _Directory(path=root() / name)
    if not places.file_type(directory.path):
        return 0  # another host of the same home has removed it
    with _locked(directory.about):
        if users := directory.users():
            raise OSError(f"job {users[0]} uses the working directory {name}")
        size = places.size_below(directory.path)
        shutil.rmtree(directory.path)
    shutil.rmtree(directory.about, ignore_errors=True)
    return size


@contextmanager
def _locked(about: Path) -> Iterator[None]:
    """Hold the lock of a name. Where the file system has none, files that appear whole have to do."""
    about.mkdir(mode=0o700, exist_ok=True)
    with open(about / "lock", "wb") as file:
        places.lock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True, kw_only=True)
class _Directory:
    """One working directory, and what is known of it."""

    path: Path

    @property
    def about(self) -> Path:
        return self.path.with_name(f".{self.path.name}")

    @property
    def origin(self) -> str | None:
        """The notebook or script that uses it, "" where it is anybody's who names it so; None before anybody has used it."""
        return self._read("origin")

    def _read(self, name: str) -> str | None:
        try:
            return (self.about / name).read_text("utf-8", "replace")
        except FileNotFoundError:
            return None

    def belongs_to(self, origin: str, owner: str) -> None:
        """Note whose it is, before anything is brought into it. Raises OSError."""
        self.about.mkdir(mode=0o700, exist_ok=True)
        if self.origin is None:
            # Whole, or not at all: half of it would be another one's.
            with atomic_write(self.about / "origin") as file:
                file.write(origin.encode())
        owners.note(self.about, owner)

    def mark_of(self, job: str, node_rank: int) -> Path:
        """Return the file that says that a node of a job uses this; its folder is there."""
        folder = self.about / "users"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / f"{job}.{node_rank}.{places.host_id()}"

    def mark(self, job: str, node_rank: int, state: str) -> None:
        """Note that a node of a job uses this from now on. Raises OSError."""
        text = f"{places.now_at(root())} {state}"
        self.mark_of(job, node_rank).write_text(text)

    def bring(self, work: WorkDir, job: str) -> list[str]:
        """Make the directory, and bring the files of a run into it; return what stays. Raises OSError and ValueError."""
        self.about.mkdir(mode=0o700, exist_ok=True)
        sync = FileSync(self.path, self.about)
        # A host that comes back to its job finds there what its ranks wrote.
        if work.is_fresh and self._read("fresh") != job:
            sync.empty()
            (self.about / "fresh").write_text(job)
        self.path.mkdir(mode=0o700, exist_ok=True)
        places.touch([self.about])
        if not work.manifest:
            return []
        return sync.bring(work.manifest)

    def used_s(self) -> float:
        """Return when it was used last. Raises OSError."""
        there = self.about if places.file_type(self.about) else self.path
        return there.stat().st_mtime

    def users(self, but: str = "") -> list[str]:
        """Return the jobs that use it, without one."""
        found = []
        for mark in places.matching(self.about / "users", "*"):
            job, node, host = [*mark.name.split(".", 2), "", ""][:3]
            if job != but and _is_alive(mark, job, node, host):
                found.append(job)
        return sorted(set(found))


def _in_words(stay: Sequence[str]) -> str:
    """Say which files stay as an earlier run left them; "" where there are none."""
    if not stay:
        return ""
    shown = [path[:_NAME_CHARS] for path in stay[:_NAMED_AT_MOST]]
    names = ", ".join(shown) + (", ..." if len(stay) > _NAMED_AT_MOST else "")
    return f"kept as an earlier run left it: {names} (--fresh empties the directory and sends what is here)"


def _is_alive(mark: Path, job: str, node: str, host: str) -> bool:
    """Whether the node of a job that has made this mark is still there. Raises OSError for what can't be read just now."""
    now = places.now_at(root())
    try:
        if host != places.host_id():
            return now - mark.stat().st_mtime < _TOUCHED_S
        since, *_ = mark.read_text().split() or ("0",)
        age_s = now - float(since)
        if age_s < _SETTLING_S or listing.is_running(job, int(node)):
            return True
        mark.unlink()
    except (FileNotFoundError, ValueError):
        pass  # gone just now, or no mark
    return False


def _free_directory(work: WorkDir, job: str, node_rank: int) -> tuple[_Directory, str]:
    """Return the first working directory of this name that is free for the run, and what a user should know of it.

    It is marked before it is looked at: of two hosts that share no locks at least one sees the other.
    """
    notice = ""
    number = 1
    while True:
        name = work.name if number == 1 else f"{work.name}-{number}"
        directory = _Directory(path=root() / name)
        number += 1
        if directory.origin not in (None, work.origin):
            if not work.origin:
                # Its user has written down where it is.
                notice = (
                    notice
                    or f"{directory.path} is the working directory of {directory.origin}"
                )
            continue
        with _left_where_it_fails(directory.path, job, node_rank):
            directory.mark(job, node_rank, _COMING)
            users = directory.users(job)
        if users and (
            work.is_fresh
            or (
                work.manifest
                and work.manifest != last_brought(directory.about).manifest
            )
        ):
            leave(directory.path, job, node_rank)
            notice = (
                notice
                or f"job {users[0]} still runs in {directory.path} with other files"
            )
            continue
        return (
            directory,
            f"{notice}; this run's files are in {directory.path}" if notice else "",
        )
