"""Files below a folder of a host: listed, fetched to this machine, and sent there.

A host names the files, and is not trusted with more: nothing that it says has a file written outside of the folder that
the user has named, through a link, or beyond the room that this disk has.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

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

_BESIDE = ".of-last-run"  # at the end of a name, for what a host has of a file that stays here
_AGAIN = 3  # for a file that a rank writes while it is fetched


class RemoteFolder:
    """A folder of a host; `open_link` opens a conversation with that host.

    Files of this machine that were edited since `began`, as `is_edited` has it, are not replaced by a fetch.
    """

    def __init__(
        self,
        folder: Folder,
        open_link: Callable[[], Link],
        began: tuple[float, float] | None = None,
    ) -> None:
        self._folder = folder
        self._open_link = open_link
        self._began = began

    def find(self, pattern: str) -> tuple[FoundFile, ...]:
        """Return the files that fit a pattern, in the order of their paths. Raises what `find_files` raises."""
        check_pattern(pattern, "pattern")
        with Reopening(self._open_link) as kept:
            return find_files(kept.link(), self._folder, pattern)

    def fetch(self, pattern: str, to: Path) -> list[Path]:
        """Copy the files that fit a pattern to the folder `to`, each at its path below it; return where they are.

        What an earlier call had of a file is not fetched again. What stays here as it is has the host's beside it. Raises `UsageError` if none fits, and `NoResult` for one
        that can't be written here, or that ranks never leave alone.
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
            if self._began and seen_files.is_edited(target, *self._began):
                beside = target.with_name(target.name + _BESIDE)
                text = f"{target} was edited on this machine since the run started, and stays; the host's is {beside.name}"
                print(sanitize.line(text), file=sys.stderr)  # noqa: T201 - a line for people
                target = beside
            for _ in range(_AGAIN):
                if self._fetch_once(kept, file, to, target):
                    return target
        except OSError as error:
            raise NoResult(
                sanitize.line(
                    f"{file.path} can't be written to {to}: {error.strerror or error}."
                ),
                "It is still on its host. Make room, or name another folder, and fetch it again.",
            ) from error
        raise NoResult(
            f"{sanitize.line(file.path)} changed each time while it was fetched.",
            "Fetch it again when the rank has finished writing. A rank that writes a new file, and then renames it, avoids this.",
        )

    def _fetch_once(
        self, kept: Reopening, file: FoundFile, to: Path, target: Path
    ) -> bool:
        """Fetch a file; return whether it came whole, unchanged meanwhile."""
        key = f"{kept.link().host.name} {self._folder} {file.path}"
        name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
        line = ProgressLine(file.path, file.size_bytes)
        half = to / f".distmagic-{name}.part"
        with resumed_write(half, 0o666) as (out, part):
            has_changed = kept.call(
                partial(self._receive, file=file, out=out, line=line),
                lambda: out.seek(0, os.SEEK_END),
            )
            line.end()
            if has_changed:
                part.unlink()
                return False
            on_disk(out)
            # A host may name any time.
            with contextlib.suppress(OSError, ValueError, OverflowError):
                os.utime(part, (file.changed_s, file.changed_s))
            part.replace(target)
        seen_files.fetched(target)
        return True

    def _receive(
        self, link: Link, file: FoundFile, out: BinaryIO, line: ProgressLine
    ) -> bool:
        """Append to `out` what it lacks of a file; return whether the file was changed meanwhile."""
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
        """Copy a file of this machine into the folder, or a folder with all its files; return their paths there.

        Links are left out. What an earlier call has sent of a file is not sent again. Raises `UsageError` for what is no
        file and no folder, and `PreflightError` where the host can't write it.
        """
        files = files_at(source)
        with Reopening(self._open_link) as kept:
            return [self._send(kept, path, name) for path, name in files]

    def _send(self, kept: Reopening, path: Path, name: str) -> str:
        local = local_file(path)
        size_bytes = local.blob.size_bytes
        request = protocol.WriteFile(
            folder=self._folder,
            path=file_names.quoted(name),
            size_bytes=size_bytes,
            sha256=local.blob.sha256,
            is_executable=bool(path.stat().st_mode & 0o100),
        )
        line = ProgressLine(name, size_bytes)
        sent = 0

        def add(size: int) -> None:
            nonlocal sent
            sent += size
            line.add(size)

        def transfer(link: Link) -> None:
            write_file(link, request, local, line.begin_at, add)

        kept.call(transfer, lambda: sent)
        line.end()
        return name


def has_room(file: BinaryIO, size_bytes: int) -> bool:
    """Whether the disk on which an open file lies has room for so many bytes more."""
    return size_bytes <= shutil.disk_usage(file.fileno()).free


def _place(to: Path, path: str) -> Path:
    """Return where a file is to be written, having made its folders. Raises OSError where a link is on the way."""
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
    """Whether a file has been fetched before, and has not been changed on its host since."""
    try:
        found = target.lstat()
    except FileNotFoundError:
        return False
    return found.st_size == file.size_bytes and found.st_mtime == file.changed_s


def local_file(path: Path) -> LocalBlob:
    """Return a file of this machine, looked at. Raises `PayloadError`."""
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


def files_at(source: Path) -> list[tuple[Path, str]]:
    """Return the file at a path, or all files of a folder, each with its name below the folder that `source` is in."""
    if source.is_file():
        return [(source, source.name)]
    if not source.is_dir():
        raise UsageError(f"{source} is neither a file nor a folder of this machine.")
    root = source.resolve()
    found = []
    for inner, _, names in os.walk(root):
        for name in names:
            path = Path(inner) / name
            if path.is_file() and not path.is_symlink():
                found.append((path, f"{root.name}/{path.relative_to(root)}"))
    if not found:
        raise UsageError(f"The folder {source} has no file.")
    return sorted(found)
