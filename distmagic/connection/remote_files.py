"""Files that ranks left in their working directories: listed, and fetched to this machine.

A host names the files, and is not trusted with more: nothing that it says has a file written outside of the folder that
the user has named, through a link, or beyond the room that this disk has.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from distmagic import sanitize
from distmagic.connection.link import Link
from distmagic.errors import ConnectionLost, NoResult, ProtocolError, SpecError
from distmagic.remote.records.manifest import is_inside
from distmagic.remote.wire import protocol
from distmagic.remote.wire.protocol import FoundFile
from distmagic.request.spec import check_pattern

_TELL_S = 0.5
_AGAIN = 3  # for a file that a rank writes while it is fetched
_CHUNK = 1 << 20


class WorkFiles:
    """The files of one job; `open_link` opens a conversation with the host of a node."""

    def __init__(self, job: str, open_link: Callable[[int], Link]) -> None:
        self._job, self._open_link = job, open_link

    def find(self, node_rank: int, pattern: str) -> tuple[FoundFile, ...]:
        """Return the files in the working directory of a node that fit a pattern, in the order of their paths."""
        check_pattern(pattern, "pattern")
        link = self._open_link(node_rank)
        try:
            found = link.found_files(
                protocol.ListFiles(job=self._job, node_rank=node_rank, pattern=pattern)
            )
        except BaseException:
            link.close()
            raise
        link.finish()
        for file in found:
            if not is_inside(file.path):
                raise ProtocolError(
                    f"{link.host.name} named a file that is not in its folder: {file.path!r}."
                )
        return found

    def fetch(self, node_rank: int, pattern: str, to: Path) -> list[Path]:
        """Copy the files that fit a pattern to the folder `to`, each at its path below it; return where they are.

        What an earlier call had of a file is not fetched again. Raises `SpecError` if none fits, and `NoResult` for one
        that can't be written here, or that ranks never leave alone.
        """
        found = self.find(node_rank, pattern)
        if not found:
            raise SpecError(
                f"No file of the run fits {pattern!r}.",
                "run.files(rank) lists those that there are.",
            )
        return [self._fetch(node_rank, file, to) for file in found]

    def _fetch(self, node_rank: int, file: FoundFile, to: Path) -> Path:
        try:
            target = _place(to, file.path)
            if _is_same(target, file):
                return target
            for _ in range(_AGAIN):
                if self._fetch_once(node_rank, file, to, target):
                    return target
        except OSError as error:
            raise NoResult(
                f"{file.path} can't be written to {to}: {error.strerror or error}.",
                "It is still on its host. Make room, or name another folder, and fetch it again.",
            ) from error
        raise NoResult(
            f"{file.path} changed each time while it was fetched.",
            "Fetch it when the rank has written it; a rank that writes a new file and renames it is never in the way.",
        )

    def _fetch_once(
        self, node_rank: int, file: FoundFile, to: Path, target: Path
    ) -> bool:
        """Fetch a file, over a new connection where one breaks in the middle; return whether it came whole."""
        name = hashlib.sha256(
            f"{self._job} {node_rank} {file.path}".encode(errors="replace")
        ).hexdigest()[:32]
        part = to / f".distmagic-{name}.part"
        line = ProgressLine(file.path, file.size_bytes)
        descriptor = os.open(
            part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        with open(descriptor, "r+b") as out:
            has_changed = self._receive(node_rank, file, out, line)
        line.end()
        if has_changed:
            part.unlink()
            return False
        with contextlib.suppress(
            OSError, ValueError, OverflowError
        ):  # a host may tell any time
            os.utime(part, (file.changed_s, file.changed_s))
        part.replace(target)
        return True

    def _receive(
        self, node_rank: int, file: FoundFile, out: BinaryIO, line: ProgressLine
    ) -> bool:
        before = -1
        while True:
            done, sha256 = _have(out)
            request = protocol.ReadFile(
                job=self._job,
                node_rank=node_rank,
                path=file.path,
                size_bytes=done,
                sha256=sha256,
            )

            def begin(begins: protocol.FileBegins, done: int = done) -> None:
                if begins.offset not in (0, done):
                    raise ProtocolError(
                        f"{file.path} is sent from byte {begins.offset:,} on, which nobody asked for."
                    )
                if (
                    begins.size_bytes - begins.offset
                    > shutil.disk_usage(out.fileno()).free
                ):
                    raise OSError(
                        f"it is {begins.size_bytes:,} bytes long, and there is less room"
                    )
                out.seek(begins.offset)
                out.truncate()
                line.begin_at(begins.offset)

            def write(data: bytes) -> None:
                out.write(data)
                line.add(len(data))

            link = self._open_link(node_rank)
            try:
                has_changed = link.read_file(request, begin, write)
            except ConnectionLost:
                link.close()
                if done == before:
                    raise
                before = done
            except BaseException:
                link.close()
                raise
            else:
                link.finish()
                return has_changed


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


def _have(out: BinaryIO) -> tuple[int, str]:
    """Return the size and the SHA-256 of what has come of a file."""
    out.flush()
    out.seek(0)
    digest = hashlib.sha256()
    size = 0
    while data := out.read(_CHUNK):
        digest.update(data)
        size += len(data)
    return size, digest.hexdigest() if size else ""


class ProgressLine:
    """One line on stderr that says how far a transfer is."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._began = self._told = time.monotonic()

    def begin_at(self, size: int) -> None:
        """Count from here: so much has come before."""
        self._done = size

    def add(self, size: int) -> None:
        """Count what has come, and tell it from time to time."""
        self._done += size
        if time.monotonic() - self._told > _TELL_S:
            self._tell("\r")

    def end(self) -> None:
        """Tell how much has come in all."""
        self._tell("\n")

    def _tell(self, end: str) -> None:
        self._told = time.monotonic()
        rate = self._done / max(self._told - self._began, 1e-9) / 1e6
        text = f"{self._what}: {self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB ({rate:,.0f} MB/s)"
        print(f"\r{sanitize.lines(text)}", end=end, file=sys.stderr, flush=True)  # noqa: T201 - a line for people
