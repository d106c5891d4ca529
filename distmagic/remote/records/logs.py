"""A file that grows for as long as a job runs, within a limit: its beginning and its newest part are kept.

NAME holds the beginning; NAME.OFFSET holds what follows from that byte on, one piece a file. When there are too many
pieces, the oldest is removed, but never the first. A byte keeps its offset for ever: a place that was noted once is found
again, or is known to be gone. A reader finds a gap filled with a line that says how large it is.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PIECES = 8  # of a full log: the first, and the seven newest


class Log:
    """The writing end. Where the disk takes nothing, `error` says why until it does again; nothing is raised."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._piece_bytes = max(1, limit_bytes // PIECES)
        self._offsets = [0]
        self._file = -1  # not open
        self._size = 0
        self.error = ""
        with contextlib.suppress(OSError):  # `append` tries again, and keeps the error
            self._reopen()

    def _reopen(self) -> None:
        self._offsets = [offset for offset, _ in pieces(self._path)] or [0]
        with contextlib.suppress(FileNotFoundError):  # a new log
            self._size = _piece(self._path, self._offsets[-1]).stat().st_size
        self._file = self._open(self._offsets[-1])

    @property
    def end(self) -> int:
        """How many bytes were written in all, those that are gone among them."""
        return self._offsets[-1] + self._size

    def append(self, data: bytes, *, whole: bool = False) -> int:
        """Write what the disk takes and return how many bytes that was; `whole`: all of it, or nothing."""
        done = 0
        try:
            if self._file < 0:
                self._reopen()
            while done < len(data):
                if (
                    self._size
                    and self._size + (len(data) if whole else 1) > self._piece_bytes
                ):
                    # Go on in a new piece, and let the oldest go.
                    offset = self.end
                    while len(self._offsets) >= PIECES:
                        _piece(self._path, self._offsets.pop(1)).unlink(missing_ok=True)
                    old, self._file = self._file, self._open(offset)
                    self._size = 0
                    self._offsets.append(offset)
                    _close(old)
                part = (
                    data
                    if whole
                    else data[done : done + self._piece_bytes - self._size]
                )
                written = os.write(self._file, part)
                self._size += written
                done += written
                if written < len(part):
                    self.error = os.strerror(errno.ENOSPC)
                    break
            else:
                self.error = ""
        except OSError as error:
            self.error = os.strerror(error.errno or 0)
        if whole and 0 < done < len(data):
            # Where that fails the half stays in the file, and counts.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size - done)
                self._size -= done
            done = 0
        return done

    def _open(self, offset: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(_piece(self._path, offset), flags, 0o600)

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            _close(self._file)
            self._file = -1


def _close(file: int) -> None:
    """Close a file. Its server may report here what it did not keep; the descriptor is gone all the same."""
    with contextlib.suppress(OSError):
        os.close(file)


def _piece(path: Path, offset: int) -> Path:
    return path.with_name(f"{path.name}.{offset}") if offset else path


def pieces(path: Path) -> list[tuple[int, Path]]:
    """Return (offset of its first byte, file) of each piece of a log that is there, in order."""
    offsets = []
    for name in os.listdir(path.parent):
        if name == path.name:
            offsets.append(0)
        elif name.startswith(f"{path.name}."):
            offset = name.removeprefix(f"{path.name}.")
            if offset.isascii() and offset.isdigit():
                offsets.append(int(offset))
    return [(offset, _piece(path, offset)) for offset in sorted(offsets)]


def end(path: Path) -> int:
    """Return how many bytes were ever written to a log. Raises OSError where there is none."""
    offset, last = max(pieces(path), default=(0, path))
    return offset + last.stat().st_size


def read(path: Path, offset: int, size: int) -> bytes:
    """Return `size` bytes of a log from `offset` on, with words in place of what is gone. Raises OSError."""
    found = _part(path, offset, size)
    if len(found) == size:
        return found
    # Not all of it is in the first piece: from all of them then.
    until = offset + size
    found = b""
    for start, piece in pieces(path):
        if start >= until:
            break
        with contextlib.suppress(FileNotFoundError):  # gone just now
            data = _part(piece, max(0, offset - start), until - max(start, offset))
            found += _gap(start - offset) + data
            offset = max(start, offset) + len(data)
    return found + _gap(until - offset)


def _part(piece: Path, at: int, size: int) -> bytes:
    with piece.open("rb") as file:
        file.seek(at)
        return file.read(size)


def _gap(size: int) -> bytes:
    if size <= 0:
        return b""
    text = f"{size:,} bytes are not kept: of a log this long only the beginning and the newest part are"
    return f"\n[distmagic: {text}]\n".encode()


def open_all(path: Path, stack: contextlib.ExitStack) -> list[tuple[BinaryIO, int]]:
    """Return (file, size) of all that there is of a log, gaps in words among them; [] for nothing. Raises OSError."""
    found: list[tuple[BinaryIO, int]] = []
    reached = 0
    for start, piece in pieces(path):
        with contextlib.suppress(FileNotFoundError):  # gone just now
            file = stack.enter_context(piece.open("rb"))
            size = os.fstat(file.fileno()).st_size
            gap = _gap(start - reached)
            if gap:
                found.append((io.BytesIO(gap), len(gap)))
            found.append((file, size))
            reached = start + size
    return found


def lines(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield the whole lines of a log, or of what there still is of it, from a line's offset on."""
    there = pieces(path)
    # Each piece ends where the next one begins.
    ends = [start for start, _ in there[1:]]
    for number, (start, piece) in enumerate(there):
        if number < len(ends) and ends[number] <= offset:
            continue
        with contextlib.suppress(FileNotFoundError), piece.open("rb") as file:
            file.seek(max(0, offset - start))
            yield from (line for line in file if line.endswith(b"\n"))
