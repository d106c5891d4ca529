"""The working directories of runs, kept from one run to the next with the same name.

    ~/.distmagic/work/NAME/    the directory in which ranks start: files that were sent, and their
                               own files
    ~/.distmagic/work/.NAME/   data about it
        origin                 the user and the notebook or script that use it; empty if a user has
                               named it
        owners                 the owners of the jobs that have used it, a line each
        files.json             the files that were last sent, by path, with their size and times
        half                   there while files are written: a killed process leaves it
        fresh                  the job for which it was last emptied
        users/JOB.NODE.HOST    the mark of a job that uses it, since when, and whether its files are
                               complete; the agent touches and removes it
        lock

Homes are often shared between hosts, and a host may run several nodes: all of them may use a
directory at once. So it is read and changed under its lock, and every file gets its name when it is
complete. The second node of a job finds all files in place. A directory never changes during a job:
another job with other files gets the next one, NAME-2, NAME-3 and so on. The same holds for a run
of another notebook or script. A directory never changes its origin: a named one and a notebook's
own never mix.

All times are by the clock that dates the files; for a shared home that is the file server's.

Theory of operation
===================

A directory is in one of four states. Only files record the state: nothing is in memory, and no
process owns it.

    absent  there is no NAME; .NAME may still have data about a removed one
    free    NAME exists, and no mark in `users` is alive
    coming  a node of a job has marked it, and is writing the job's files
    used    a mark says "ready": all files are complete, and only ranks change them

absent, free -> coming: `prepare` marks the first directory of the name that has the run's origin,
and only then checks whether another job uses it. So of two hosts that share no locks, at least one
sees the other's mark.

coming -> used: every file is complete, `files.json` lists them, and the mark says "ready". A
further node of the job finds that mark in any of the directories, and writes nothing.

coming -> free: it failed, or was ended. The next run treats files written before an error as sent.

coming -> the next NAME, if another job with other files uses this one, or if this job needs an
empty one. A job with the same files shares the directory.

used -> free: the agent of each node removes its mark. A mark of this host is also dead if its agent
is gone, 20 s after it was made. A mark of another host is dead if it was not touched for 120 s.

free -> absent: `remove`, on a user's request, or `expire`, after 7 days without use.

What happens to a file in `coming` (work_sync.py):

    listed, and missing                           it is written
    listed, and unchanged since it was sent       it is updated
    listed, and a run has written or changed it   it is kept, and the run shows a notice
    no longer listed, and unchanged               it is removed, if its path is one of the run's own
                                                  (`owned`)
    no longer listed, and a run has changed it    it is kept
    never sent                                    it is kept

With --fresh the directory is emptied before that, once for a job.

Promised: a file appears complete or not at all. Files that were sent do not change during a job.
Files of ranks are kept until --fresh, `remove` or `expire`, whatever happens to the next run. A
directory never goes to another notebook. After an error during the writing of files, the next run
only takes longer.

Not promised: two jobs that share a directory may write to the same file. A touched file of 1 MiB or
more is not recognized as unchanged.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from distmagic.remote.frozen import frozen
from distmagic.remote.records import listing, owners, places
from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.records.work_sync import FileSync, last_brought
from distmagic.remote.wire.protocol import KeptWorkDir, WorkDir

_SETTLING_S = 20.0  # time between the mark of a job and the socket of its agent
# The content of a mark: whether the files are complete.
_COMING, _READY = "coming", "ready"
_TOUCHED_S = 120.0  # agents touch their mark four times in that time
_EMPTYING_S = 20.0  # time for another host to empty a directory
_PAUSE_S = 0.05
_NAMED_AT_MOST = 3
_EXPIRE_S = 5.0
_NAME_CHARS = 200


@frozen
class Prepared:
    """A working directory that is ready. `notice` is a message for the user, "" for none."""

    path: Path
    notice: str = ""


def root() -> Path:
    """Return the directory of all working directories, which may not exist."""
    return places.home() / "work"


def prepare(work: WorkDir, job: str, node_rank: int, owner: str = "") -> Prepared:
    """Prepare the working directory of a job's node.

    Record that the job uses it, and which owner started the job. Raises OSError and ValueError.
    """
    places.make_private(root())
    notice = ""
    with _locked(root() / f".{work.name}"):
        directory = None
        for mark in places.matching(root(), f".*/users/{job}.*"):
            # Another node of the same job has prepared it.
            with suppress(FileNotFoundError):
                if mark.read_text().endswith(_READY):
                    directory = _Directory(path=root() / mark.parent.parent.name[1:])
        if directory is None:
            directory, notice = _free_directory(work, job, node_rank)
            with _left_where_it_fails(directory.path, job, node_rank):
                directory.belongs_to(work.origin, owner)
                # Otherwise all is complete, and nothing may change during the running job. A host
                # may lose power between a mark and the directory.
                if not directory.path.is_dir() or not directory.users(job):
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
    """Record that a job still uses its working directory. Errors of the disk are ignored."""
    with suppress(OSError):
        directory = _Directory(path=path)
        places.touch([directory.about])
        # It may have been removed with everything else.
        directory.mark_of(job, node_rank).touch()


def leave(path: Path, job: str, node_rank: int) -> None:
    """Record that a node of a job no longer uses its working directory.

    Errors of the disk are ignored.
    """
    with suppress(OSError):
        _Directory(path=path).mark_of(job, node_rank).unlink()


@contextmanager
def _left_where_it_fails(path: Path, job: str, node_rank: int) -> Iterator[None]:
    """If the block raises, remove the node's mark, so that the next job need not wait for it."""
    try:
        yield
    except BaseException:
        leave(path, job, node_rank)
        raise


def kept() -> Iterator[KeptWorkDir]:
    """Yield the working directories of this home, ordered by name.

    Unreadable ones are left out.
    """
    for path in places.matching(root(), "[!.]*"):
        directory = _Directory(path=path)
        with suppress(OSError):
            yield KeptWorkDir(
                name=path.name,
                origin=directory.origin or "",
                owners=owners.of(directory.about),
                size_bytes=places.size_below(path),
                age_s=max(0.0, places.now_at(root()) - directory.used_s()),
                is_used=bool(directory.users()),
            )


def expire(now: float, kept_s: float) -> None:
    """Remove working directories that no job has used for so long.

    After a few seconds it stops, and the rest waits for the next time.
    """
    until = time.monotonic() + _EXPIRE_S
    for path in places.matching(root(), "*"):
        if time.monotonic() > until:
            break  # a notebook waits for its first answer
        with suppress(OSError):
            if path.name.startswith("."):
                # The data of a working directory, which may no longer exist.
                is_there = places.file_type(path.with_name(path.name[1:]))
                if not is_there and now - path.stat().st_mtime > kept_s:
                    shutil.rmtree(path)
            elif now - _Directory(path=path).used_s() > kept_s:
                remove(path.name)


def remove(name: str) -> int:
    """Remove a working directory; return its bytes. Raises OSError if a job uses it."""
    if "/" in name or "\0" in name or name.startswith(".") or not name:
        raise ValueError(f"{name[:80]!r} is not a working directory")
    directory = _Directory(path=root() / name)
    if not places.file_type(directory.path):
        return 0  # another host with the same home has removed it
    with _locked(directory.about):
        if users := directory.users():
            raise OSError(f"job {users[0]} uses the working directory {name}")
        size = places.size_below(directory.path)
        shutil.rmtree(directory.path)
    shutil.rmtree(directory.about, ignore_errors=True)
    return size


@contextmanager
def _locked(about: Path) -> Iterator[None]:
    """Hold the lock of a name. If the file system has no locks, atomic files must be enough."""
    about.mkdir(mode=0o700, exist_ok=True)
    with open(about / "lock", "wb") as file:
        places.lock(file, fcntl.LOCK_EX)
        yield


@frozen
class _Directory:
    """One working directory, and the data about it."""

    path: Path

    @property
    def about(self) -> Path:
        return self.path.with_name(f".{self.path.name}")

    @property
    def origin(self) -> str | None:
        """The notebook or script that uses it; "" if it was named by a user; None before its first
        use.
        """
        return self._read("origin")

    def _read(self, name: str) -> str | None:
        try:
            return (self.about / name).read_text("utf-8", "replace")
        except FileNotFoundError:
            return None

    def belongs_to(self, origin: str, owner: str) -> None:
        """Record who uses the directory, before a file is written into it: `origin` as in the
        property, and the `owner` of the job. Raises OSError.
        """
        # `remove` of another host may have removed it a moment after this job has marked it.
        self.about.mkdir(mode=0o700, exist_ok=True)
        if self.origin is None:
            # Atomically: a partial origin would be another one.
            with atomic_write(self.about / "origin") as file:
                file.write(origin.encode())
        owners.note(self.about, owner)

    def mark_of(self, job: str, node_rank: int) -> Path:
        """Return the mark file of a node of a job; its folder exists."""
        folder = self.about / "users"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / f"{job}.{node_rank}.{places.host_id()}"

    def mark(self, job: str, node_rank: int, state: str) -> None:
        """Record that a node of a job uses this from now on. Raises OSError."""
        text = f"{places.now_at(root())} {state}"
        self.mark_of(job, node_rank).write_text(text)

    def bring(self, work: WorkDir, job: str) -> list[str]:
        """Make the directory, and write the files of a run into it; return those kept as they are.

        Raises OSError and ValueError.
        """
        self.about.mkdir(mode=0o700, exist_ok=True)  # as in `belongs_to`
        sync = FileSync(self.path, self.about)
        # A host that returns to its job finds the files that its ranks wrote.
        if work.is_fresh and self._read("fresh") != job:
            self._empty(sync, job)
        self.path.mkdir(mode=0o700, exist_ok=True)
        places.touch([self.about])
        if not work.manifest:
            return []
        return sync.bring(work.manifest)

    def _empty(self, sync: FileSync, job: str) -> None:
        """Empty the directory, once for a job: of two hosts that share no locks, the second one
        waits for the first.
        """
        claim = self.about / f"fresh.{job}"
        try:
            claim.open("x").close()
        except FileExistsError:  # raises OSError if that one fails
            until = time.monotonic() + _EMPTYING_S
            while self._read("fresh") != job:
                if time.monotonic() > until:
                    text = f"{self.path} was not emptied by another host"
                    raise OSError(text) from None
                time.sleep(_PAUSE_S)
            return
        try:
            if self._read("fresh") != job:  # another host may have emptied it just now
                sync.empty()
                (self.about / "fresh").write_text(job)
        finally:
            claim.unlink(missing_ok=True)

    def used_s(self) -> float:
        """Return when the directory was last used. Raises OSError."""
        there = self.about if places.file_type(self.about) else self.path
        return there.stat().st_mtime

    def users(self, but: str = "") -> list[str]:
        """Return the jobs that use it, except `but`."""
        found = []
        for mark in places.matching(self.about / "users", "*"):
            job, node, host = [*mark.name.split(".", 2), "", ""][:3]
            if job != but and _is_alive(mark, job, node, host):
                found.append(job)
        return sorted(set(found))


def _in_words(stay: Sequence[str]) -> str:
    """Return a notice about the files that stay as an earlier run left them; "" if there are
    none.
    """
    if not stay:
        return ""
    shown = [path[:_NAME_CHARS] for path in stay[:_NAMED_AT_MOST]]
    names = ", ".join(shown) + (", ..." if len(stay) > _NAMED_AT_MOST else "")
    return f"kept as an earlier run left it: {names} (--fresh empties the directory and sends the notebook's files)"


def _is_alive(mark: Path, job: str, node: str, host: str) -> bool:
    """Whether the node that made this mark still exists.

    Raises OSError if that is temporarily unknown.
    """
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
        pass  # just removed, or no mark
    return False


def _free_directory(work: WorkDir, job: str, node_rank: int) -> tuple[_Directory, str]:
    """Return the first working directory of this name that is free for the run, and a message for
    the user.

    It is marked before it is checked: of two hosts that share no locks at least one sees the other.
    """
    notice = ""
    number = 1
    while True:
        name = work.name if number == 1 else f"{work.name}-{number}"
        directory = _Directory(path=root() / name)
        number += 1
        if directory.origin not in (None, work.origin):
            if not work.origin:
                # The job that uses it has recorded its path.
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
