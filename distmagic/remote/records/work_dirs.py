"""The working directories of runs, which are kept from one run of a name to the next.

    ~/.distmagic/work/NAME/           what ranks find when they begin: files that were brought, and those they wrote
    ~/.distmagic/work/.NAME/          what is known of it
        origin                        the notebook or script that uses it
        files.json                    what was brought last, by path, and how each file looked when it was written
        users/JOB.NODE.HOST           a job that uses it; its agent touches this file, and removes it in the end
        lock

Homes are often shared between hosts, and a host may run several nodes: all of them may come here at once. So a directory
is looked at and changed under its lock; every file gets its name when it is whole; and the second node of a job finds
that all is there. A directory never changes under a job that runs: another job with other files gets the next one,
NAME-2, NAME-3 and so on. So does a run of another notebook or script.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distmagic.remote.records import listing, manifest, places
from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.records.manifest import ListedFile, Manifest
from distmagic.remote.wire.protocol import WorkDir

_SETTLING_S = 60.0  # from the mark of a job to the socket of its agent
_TOUCHED_S = 120.0  # agents touch their mark four times in that time
_CHUNK = 1 << 20
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A working directory that is ready. `notice` says what a user should know of it, "" for nothing."""

    path: Path
    notice: str = ""


def root() -> Path:
    """Return the directory of all working directories, whether or not it is there."""
    return places.home() / "work"


def prepare(work: WorkDir, job: str, node_rank: int) -> Prepared:
    """Make the working directory of a job's node ready, and note that the job uses it. Raises OSError and ValueError."""
    places.make_private(root())
    notice = ""
    with _locked(root() / f".{work.name}"):
        place = _place_of(job)
        if place is None:
            place, notice = _free_place(work, job)
            if not place.users(job):  # else all is there, and nothing may change under the job that runs
                _Sync(place, work).run()
                (place.about / "origin").write_text(work.origin or place.origin)
        place.mark(job, node_rank).touch(mode=0o600)
    if work.inside:
        (place.path / work.inside).mkdir(parents=True, exist_ok=True)
    return Prepared(path=place.path, notice=notice)


def touch(path: Path, job: str, node_rank: int) -> None:
    """Note that a job still uses its working directory."""
    place = _Place(path=path)
    places.touch([place.about, place.mark(job, node_rank)])


def leave(path: Path, job: str, node_rank: int) -> None:
    """Note that a node of a job no longer uses its working directory. Errors of the disk are ignored."""
    with contextlib.suppress(OSError):
        _Place(path=path).mark(job, node_rank).unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDir:
    """A working directory that is there: its place, when it was used last (seconds since 1970), and what it holds."""

    path: Path
    origin: str
    used_s: float
    size_bytes: int
    is_used: bool


def kept() -> list[KeptDir]:
    """Return the working directories of this home, in the order of their names. What can't be read is left out."""
    found = []
    for path in sorted(root().glob("[!.]*")):
        place = _Place(path=path)
        with contextlib.suppress(OSError):
            one = KeptDir(
                path=path,
                origin=place.origin,
                used_s=place.used_s(),
                size_bytes=_size_below(path),
                is_used=bool(place.users()),
            )
            found.append(one)
    return found


def expire(now: float, kept_s: float) -> None:
    """Remove working directories that no job has used for so long."""
    for path in root().glob("[!.]*"):
        place = _Place(path=path)
        with contextlib.suppress(OSError):
            if now - place.used_s() > kept_s:
                remove(path.name)
    for about in root().glob(".*"):
        with contextlib.suppress(OSError):
            if not about.with_name(about.name[1:]).exists() and now - about.stat().st_mtime > kept_s:
                shutil.rmtree(about)


def remove(name: str) -> int:
    """Remove a working directory that no job uses; return its bytes. Raises OSError if one does."""
    place = _Place(path=root() / _checked(name))
    if not place.path.exists():
        return 0  # another host of the same home has removed it
    with _locked(place.about):
        if users := place.users():
            raise OSError(f"job {users[0]} uses the working directory {name}")
        size = _size_below(place.path)
        shutil.rmtree(place.path)
    shutil.rmtree(place.about, ignore_errors=True)
    return size


def _checked(name: str) -> str:
    if "/" in name or "\0" in name or name.startswith(".") or not name:
        raise ValueError(f"{name[:80]!r} is no working directory")
    return name


def _size_below(folder: Path) -> int:
    size = 0
    for inner, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(inner, name)).st_size
    return size


@contextmanager
def _locked(about: Path) -> Iterator[None]:
    """Hold the lock of a name. Where the file system has none, files that appear whole have to do."""
    about.mkdir(mode=0o700, exist_ok=True)
    with open(about / "lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One working directory, and what is known of it."""

    path: Path

    @property
    def about(self) -> Path:
        return self.path.with_name(f".{self.path.name}")

    @property
    def origin(self) -> str:
        try:
            return (self.about / "origin").read_text()
        except OSError:
            return ""

    def mark(self, job: str, node_rank: int) -> Path:
        """Return the file that says that a node of a job uses this; its folder is there."""
        folder = self.about / "users"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / f"{job}.{node_rank}.{socket.gethostname()}"

    def used_s(self) -> float:
        """Return when it was used last. Raises OSError."""
        there = self.about if self.about.is_dir() else self.path
        return there.stat().st_mtime

    def users(self, but: str = "") -> list[str]:
        """Return the jobs that use it, without one."""
        found = []
        for mark in (self.about / "users").glob("*"):
            job, node, host = [*mark.name.split(".", 2), "", ""][:3]
            if job != but and _is_alive(mark, job, node, host):
                found.append(job)
        return sorted(set(found))


def _is_alive(mark: Path, job: str, node: str, host: str) -> bool:
    """Whether the node of a job that has made this mark is still there."""
    try:
        age_s = time.time() - mark.stat().st_mtime
        if host != socket.gethostname():
            is_alive = age_s < _TOUCHED_S
        else:
            is_alive = age_s < _SETTLING_S or listing.is_running(job, int(node))
    except (OSError, ValueError):
        return False  # gone just now, or no mark
    if not is_alive:
        with contextlib.suppress(OSError):
            mark.unlink()
    return is_alive


def _place_of(job: str) -> _Place | None:
    """Return the working directory that another node of the same job has made ready."""
    for mark in root().glob(f".*/users/{job}.*"):
        return _Place(path=root() / mark.parent.parent.name[1:])
    return None


def _free_place(work: WorkDir, job: str) -> tuple[_Place, str]:
    """Return the first working directory of this name that is free for the run, and what a user should know of it."""
    notice = ""
    number = 1
    while True:
        name = work.name if number == 1 else f"{work.name}-{number}"
        place = _Place(path=root() / name)
        number += 1
        if work.origin and place.origin not in ("", work.origin):
            continue
        users = place.users(job)
        if users and (work.is_fresh or (work.manifest and work.manifest != _read_state(place).manifest)):
            notice = notice or f"job {users[0]} still runs in {place.path} with other files"
            continue
        return place, f"{notice}; this run's files are in {place.path}" if notice else ""


# ---- files


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What was brought last: the manifest's SHA-256, and by path what a file was and how it looked when it was written."""

    manifest: str = ""
    files: dict[str, list[Any]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)


def _read_state(place: _Place) -> _State:
    try:
        found = json.loads((place.about / "files.json").read_text())
        return _State(manifest=found["manifest"], files=found["files"], links=found["links"])
    except (OSError, ValueError, KeyError, TypeError):
        return _State()


class _Sync:
    """Brings a working directory to the state that a manifest lists."""

    def __init__(self, place: _Place, work: WorkDir) -> None:
        self._place, self._work = place, work
        self._incoming = place.about / "incoming"
        self._safe_folders: set[str] = {""}

    def run(self) -> None:
        """Make the directory; write what has changed, and remove what is listed no more. Raises OSError, ValueError."""
        place, work = self._place, self._work
        place.about.mkdir(mode=0o700, exist_ok=True)
        if work.is_fresh:
            self._empty()
        place.path.mkdir(mode=0o700, exist_ok=True)
        places.touch([place.about])
        if not work.manifest:
            return
        wanted = manifest.decode(places.blob(work.manifest).read_bytes())
        before = _read_state(place)
        shutil.rmtree(self._incoming, ignore_errors=True)  # of one that was ended in the middle
        self._incoming.mkdir(mode=0o700)
        try:
            self._remove_unlisted(wanted, before)
            links = self._make_links(wanted)
            files = self._write_files(wanted, before)
        finally:
            shutil.rmtree(self._incoming, ignore_errors=True)
        kept_files = {path: row for path, row in before.files.items() if not wanted.owns(path)}
        kept_links = {path: target for path, target in before.links.items() if not wanted.owns(path)}
        after = {"manifest": work.manifest, "files": kept_files | files, "links": kept_links | links}
        with atomic_write(place.about / "files.json") as file:
            file.write(json.dumps(after, separators=(",", ":")).encode())

    def _empty(self) -> None:
        aside = self._place.about / f"old-{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._place.path, aside)
        with contextlib.suppress(FileNotFoundError):
            (self._place.about / "files.json").unlink()
        for old in self._place.about.glob("old-*"):
            shutil.rmtree(old, ignore_errors=True)

    def _remove_unlisted(self, wanted: Manifest, before: _State) -> None:
        """Remove what the last run of this name brought and this one does not; what ranks wrote stays."""
        listed = {file.path for file in wanted.files} | {path for path, _ in wanted.links}
        for path in (*before.files, *before.links):
            if path in listed or not wanted.owns(path) or not self._is_below_own_folders(path):
                continue
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
                self._forget_compiled(path)
                (self._place.path / path).unlink()
            self._remove_empty_parents(path)

    def _remove_empty_parents(self, path: str) -> None:
        for parent in Path(path).parents:
            if parent.name:
                try:
                    (self._place.path / parent).rmdir()
                except OSError:
                    return  # there is something left in it

    def _is_below_own_folders(self, path: str) -> bool:
        """Whether no folder above this path has become a link, which would lead out of the directory."""
        above = [str(parent) for parent in Path(path).parents if parent.name]
        return not any((self._place.path / parent).is_symlink() for parent in above)

    def _make_folder(self, inner: str) -> None:
        """Make a folder below the directory. Raises OSError where a link or a file of the same name is in the way."""
        if inner in self._safe_folders:
            return
        self._make_folder(inner.rpartition("/")[0])
        path = self._place.path / inner
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise _in_the_way(path, "a folder")
        path.mkdir(mode=0o700, exist_ok=True)
        self._safe_folders.add(inner)

    def _make_links(self, wanted: Manifest) -> dict[str, str]:
        for inner in wanted.folders:
            self._make_folder(inner)
        for path, target in wanted.links:
            self._make_folder(path.rpartition("/")[0])
            here = self._place.path / path
            if here.is_symlink() and os.readlink(here) == target:
                continue
            if here.is_dir() and not here.is_symlink():
                raise _in_the_way(here, "a link")
            aside = self._incoming / secrets.token_hex(6)
            aside.symlink_to(target)
            os.replace(aside, here)
        return dict(wanted.links)

    def _write_files(self, wanted: Manifest, before: _State) -> dict[str, list[Any]]:
        """Write the files that are not there yet as they are listed; return what is known of all of them now."""
        rows: dict[str, list[Any]] = {}
        lacking: dict[int, list[ListedFile]] = {}
        for file in wanted.files:
            source = [wanted.packs[file.pack], file.offset, file.size_bytes, file.is_executable]
            row = before.files.get(file.path)
            if row is not None and row[:4] == source and row[4:] == self._look(file.path):
                rows[file.path] = row
            else:
                lacking.setdefault(file.pack, []).append(file)
        for pack, files in lacking.items():
            with places.blob(wanted.packs[pack]).open("rb") as source_file:
                for file in files:
                    source_file.seek(file.offset)
                    self._write(file, source_file)
                    source = [wanted.packs[pack], file.offset, file.size_bytes, file.is_executable]
                    rows[file.path] = [*source, *self._look(file.path)]
        return rows

    def _look(self, path: str) -> list[int]:
        """Return what changes when somebody writes to a file; [] where it is gone."""
        try:
            found = os.lstat(self._place.path / path)
        except OSError:
            return []
        return [found.st_mtime_ns, found.st_size, found.st_mode, found.st_ino]

    def _write(self, file: ListedFile, source: Any) -> None:
        """Give a file its content, all at once. A file that has it already is left as it is."""
        self._make_folder(file.path.rpartition("/")[0])
        here = self._place.path / file.path
        if here.is_dir() and not here.is_symlink():
            raise _in_the_way(here, "a file")
        mode = 0o700 if file.is_executable else 0o600
        is_large = file.size_bytes >= manifest.LARGE_BYTES
        data = b"" if is_large else source.read(file.size_bytes)
        if not is_large and self._has(here, data, mode):
            return
        aside = self._incoming / secrets.token_hex(6)
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as out:
            if is_large:
                shutil.copyfileobj(source, out, _CHUNK)  # all of the pack
            else:
                out.write(data)
        self._forget_compiled(file.path)
        os.replace(aside, here)

    def _has(self, here: Path, data: bytes, mode: int) -> bool:
        try:
            found = os.lstat(here)
            return found.st_size == len(data) and found.st_mode == 0o100000 | mode and here.read_bytes() == data
        except OSError:
            return False

    def _forget_compiled(self, path: str) -> None:
        """Remove the byte code of a module: Python would take it for that of the new text written in the same second."""
        inner, _, name = path.rpartition("/")
        if name.endswith(".py"):
            stem = name.removesuffix(".py")
            _unlink(
                one
                for one in (self._place.path / inner / "__pycache__").glob("*.pyc")
                if one.name.partition(".")[0] == stem or one.name.startswith(f"{stem}.")
            )


def _in_the_way(path: Path, what: str) -> OSError:
    return FileExistsError(
        f"{path} is in the way of {what} of that name; take it away there, or begin with an empty directory: --fresh"
    )


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
