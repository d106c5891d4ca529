"""Files below a folder on a host: listed, downloaded and uploaded.

The host provides the names of files, which are not trusted. No name can make this machine write
outside of the user's folder, through a symbolic link, or more than fits on the disk.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from distmagic import sanitize
from distmagic.connection.link import Link
from distmagic.connection.requests.file_requests import (
    Reopening,
    find_files,
    read_file,
    write_file,
)
from distmagic.connection.requests.progress_line import ProgressLine
from distmagic.errors import NoResult, PayloadError, ProtocolError, UsageError
from distmagic.payload import seen_files
from distmagic.payload.blobs import LocalBlob
from distmagic.remote.records import found_files
from distmagic.remote.records.atomic_file import on_disk, resumed_write
from distmagic.remote.wire import file_names, protocol
from distmagic.remote.wire.protocol import Blob, Folder, FoundFile
from distmagic.request.spec import check_pattern

_BESIDE = ".of-last-run"  # suffix of the host's version of a file that was edited on this machine
_NAME_BYTES = 255  # the longest name of a file on Linux
_AGAIN = 3  # attempts for a file that a rank writes during the transfer


@dataclass(frozen=True)
class RemoteFolder:
    """A folder on a host, and what opens a conversation with that host.

    A fetch does not replace files of this machine that were edited since `began_up_s` (see
    `is_edited`); without it, those that were edited since this process sent or fetched them.
    """

    _folder: Folder
    _open_link: Callable[[], Link]
    began_up_s: float = math.inf

    def find(self, pattern: str) -> tuple[FoundFile, ...]:
        """Return the files that match a pattern, ordered by path.

        Raises the errors of `find_files`.
        """
        check_pattern(pattern, "pattern")
        with Reopening(self._open_link) as kept:
            return find_files(kept.link(), self._folder, pattern)

    def fetch(self, pattern: str, to: Path) -> list[Path]:
        """Copy the files that match a pattern to the folder `to`, keeping their relative paths;
        return the paths of the copies.

        Parts that an earlier call fetched are not fetched again. If a file was edited on this
        machine, the host's version is written next to it. Raises `UsageError` if no file matches,
        and `NoResult` for a file that can't be written on this machine, or that keeps changing.
        """
        check_pattern(pattern, "pattern")
        with Reopening(self._open_link) as kept:
            found = find_files(kept.link(), self._folder, pattern)
            if not found:
                name = kept.link().host.name
                raise UsageError(
                    f"No file on {name} fits {pattern!r}.",
                    "Links are not followed, and * stays in one folder: **/*.pt looks in all of them.",
                )
            return [self._fetch(kept, file, to) for file in found]

    def _fetch(self, kept: Reopening, file: FoundFile, to: Path) -> Path:
        try:
            target = _place(to, file.path)
            if _is_same(target, file):
                return target
            for _ in range(_AGAIN):
                fetched = self._fetch_once(kept, file, to, target)
                if fetched is not None:
                    return fetched
        except OSError as error:
            raise NoResult(
                sanitize.line(
                    f"{file.path} can't be written to {to}: {error.strerror or error}."
                ),
                "The file is still on its host. Make room, or name another folder, and fetch the file again.",
            ) from error
        raise NoResult(
            f"{sanitize.line(file.path)} changed each time while it was fetched.",
            "Fetch it again when the rank has finished writing. A rank that writes a new file, and then renames it, avoids this.",
        )

    def _fetch_once(
        self, kept: Reopening, file: FoundFile, to: Path, target: Path
    ) -> Path | None:
        """Fetch a file, and return where it is; None if it changed on its host meanwhile."""
        # Of this machine alone: it may share the folder with others, without a lock that they all
        # see.
        key = (
            f"{socket.gethostname()} {kept.link().host.name} {self._folder} {file.path}"
        )
        name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
        line = ProgressLine(file.path, file.size_bytes)
        half = to / f".distmagic-{name}.part"
        mode = file.mode
        with suppress(FileNotFoundError):
            # Of an earlier copy, which is replaced: as scp does.
            mode = target.stat().st_mode
        with resumed_write(half, (0o600 | mode) & 0o777) as (out, part):
            has_changed = kept.call(
                partial(self._receive, file=file, out=out, line=line),
                lambda: out.seek(0, os.SEEK_END),
            )
            line.end()
            if has_changed:
                part.unlink()
                return None
            on_disk(out)
            # A host may send any time.
            with suppress(OSError, ValueError, OverflowError):
                os.utime(part, (file.changed_s, file.changed_s))
            # Only now: somebody may edit a file while its copy is on the way.
            place = self._place(target)
            part.replace(place)
        seen_files.fetched(place)
        return place

    def _place(self, target: Path) -> Path:
        """Return the path for a fetched file: next to `target`, with a line for people, if the user
        has edited `target`.
        """
        if not seen_files.is_edited(target, self.began_up_s):
            return target
        name = target.name
        while len(os.fsencode(name + _BESIDE)) > _NAME_BYTES:
            name = name[:-1]
        beside = target.with_name(name + _BESIDE)
        text = f"{target} was edited on this machine, and is kept; the host's version is {beside.name}"
        print(sanitize.line(text), file=sys.stderr)  # noqa: T201 - a line for people
        return beside

    def _receive(
        self, link: Link, file: FoundFile, out: BinaryIO, line: ProgressLine
    ) -> bool:
        """Append the missing part of a file to `out`; return whether the file changed meanwhile."""
        done = out.seek(0, os.SEEK_END)

        def begin(begins: protocol.FileBegins) -> None:
            if begins.offset not in (0, done):
                raise ProtocolError(
                    f"{sanitize.line(file.path)} is sent from byte {begins.offset:,} on, which nobody asked for."
                )
            left = begins.size_bytes - begins.offset
            if not has_room(out, left):
                raise OSError(
                    f"it is {begins.size_bytes:,} bytes long, and the disk has less room"
                )
            out.seek(begins.offset)
            out.truncate()
            line.begin_at(begins.offset)

        def write(data: bytes) -> None:
            out.write(data)
            line.add(len(data))

        request = protocol.ReadFile(
            folder=self._folder,
            path=file_names.quoted(file.path),
            size_bytes=done,
            sha256=found_files.digest(out, 0, done) if done else "",
        )
        return read_file(link, request, begin, write)

    def send(self, source: Path) -> list[str]:
        """Copy a file of this machine into the folder, or a folder with all its files; return their
        paths on the host.

        Symbolic links are left out. Parts that an earlier call sent are not sent again. Raises
        `UsageError` for a path that is neither file nor folder, and `PreflightError` if the host
        can't write it.
        """
        files = files_at(source)
        with Reopening(self._open_link) as kept:
            return [self._send(kept, file) for file in files]

    def _send(self, kept: Reopening, file: SourceFile) -> str:
        local = local_file(Path(file.path))
        size_bytes = local.blob.size_bytes
        request = protocol.WriteFile(
            folder=self._folder,
            path=file_names.quoted(file.name),
            size_bytes=size_bytes,
            sha256=local.blob.sha256,
            mode=file.mode,
        )
        line = ProgressLine(file.name, size_bytes)
        sent = 0

        def add(size: int) -> None:
            nonlocal sent
            sent += size
            line.add(size)

        def transfer(link: Link) -> None:
            write_file(link, request, local, line.begin_at, add)

        kept.call(transfer, lambda: sent)
        line.end()
        return file.name


def has_room(file: BinaryIO, size_bytes: int) -> bool:
    """Whether the disk of an open file has room for so many more bytes."""
    return size_bytes <= shutil.disk_usage(file.fileno()).free


def _place(to: Path, path: str) -> Path:
    """Return the local path of a file, and make its folders.

    Raises OSError if a symbolic link is on the way.
    """
    to.mkdir(parents=True, exist_ok=True)
    target = to
    *folders, name = path.split("/")
    for folder in folders:
        target = target / folder
        if target.is_symlink():
            raise OSError(f"{target} is a link")
        target.mkdir(exist_ok=True)
    target = target / name
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder")
    return target


def _is_same(target: Path, file: FoundFile) -> bool:
    """Whether a file has been fetched before, and has not changed on its host since."""
    try:
        found = target.lstat()
    except FileNotFoundError:
        return False
    return found.st_size == file.size_bytes and found.st_mtime == file.changed_s


def local_file(path: Path) -> LocalBlob:
    """Return a file of this machine with its size. Raises `PayloadError`."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            sha256 = found_files.digest(file, 0, size_bytes)
    except OSError as error:
        raise PayloadError(
            f"{path} can't be read: {error.strerror or error}."
        ) from error
    blob = Blob(sha256=sha256, size_bytes=size_bytes)
    return LocalBlob(blob=blob, path=path, is_users=True)


class SourceFile(NamedTuple):
    """A file of this machine that goes to hosts: its path, its path below the folder on the host,
    its size, its last change in nanoseconds since 1970, and the permissions of its copy.
    """

    path: str
    name: str
    size_bytes: int
    changed_ns: int
    mode: int


def files_at(source: Path) -> list[SourceFile]:
    """Return the file at a path, or all files of a folder, each with its path relative to the
    parent of `source`; links are left out.

    Raises `UsageError` for anything else, and for a folder without files; `PayloadError` for one
    that can't be read.
    """
    try:
        if source.is_file():
            return [_source_file(str(source), source.name, source.stat(), 0o777)]
        if not source.is_dir():
            raise UsageError(
                f"{source} is neither a file nor a folder of this machine."
            )
        found = list(_files_below(source.resolve()))
    except OSError as error:
        raise PayloadError(
            f"{error.filename} can't be read: {error.strerror}."
        ) from error
    if not found:
        raise UsageError(f"The folder {source} has no file.")
    return sorted(found)


def _files_below(root: Path) -> Iterator[SourceFile]:
    # Not by pathlib, which takes three times as long: a folder may have 20,000 files.
    folders = [(str(root), root.name)]
    while folders:
        folder, copied = folders.pop()
        try:
            mode = found_files.mode_in_copy(Path(folder), copied)
            scanned = os.scandir(folder)
        except (PermissionError, FileNotFoundError) as error:
            if folder == str(root):
                raise
            text = f"{folder} is left out: it can't be read ({error.strerror})"
            print(sanitize.line(text), file=sys.stderr)  # noqa: T201 - a line for people
            continue
        with scanned as entries:
            for entry in entries:
                name = f"{copied}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    folders.append((entry.path, name))
                elif entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # it was just removed
                        status = entry.stat(follow_symlinks=False)
                        yield _source_file(entry.path, name, status, mode)


def _source_file(path: str, name: str, status: os.stat_result, mode: int) -> SourceFile:
    return SourceFile(
        path, name, status.st_size, status.st_mtime_ns, status.st_mode & mode
    )
