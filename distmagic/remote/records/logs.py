"""A log file with a size limit: it keeps its beginning and its newest part.

NAME has the beginning; each NAME.OFFSET has a piece that starts at that byte. When there are too
many pieces, the oldest except the first is removed. A byte never changes its offset, so a recorded
position is found again, or is known to be gone. For a gap, a reader gets a line with its size.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

PIECES = 8  # pieces of a full log: the first, and the seven newest


class Log:
    """The writing end. While the disk rejects data, `error` has the reason; nothing is raised."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._piece_bytes = max(1, limit_bytes // PIECES)
        self._offsets = [0]
        self._file = -1  # not open
        self._size = 0
        self.error = ""
        with suppress(OSError):  # `append` tries again, and keeps the error
            self._reopen()

    def _reopen(self) -> None:
        self._offsets = [offset for offset, _ in pieces(self._path)] or [0]
        with suppress(FileNotFoundError):  # a new log
            self._size = _piece(self._path, self._offsets[-1]).stat().st_size
        self._file = self._open(self._offsets[-1])

    @property
    def end(self) -> int:
        """The total number of bytes written, including removed ones."""
        return self._offsets[-1] + self._size

    def append(self, data: bytes, *, whole: bool = False) -> int:
        """Write as much as the disk accepts and return the number of bytes; `whole`: all of it, or
        nothing.
        """
        done = 0
        try:
            if self._file < 0:
                self._reopen()
            while done < len(data):
                if (
                    self._size
                    and self._size + (len(data) if whole else 1) > self._piece_bytes
                ):
                    # Continue in a new piece, and remove the oldest.
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
            # If that fails, the half stays in the file, and counts.
            with suppress(OSError):
                os.ftruncate(self._file, self._size - done)
                self._size -= done
            done = 0
        return done

    def _open(self, offset: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return os.open(_piece(self._path, offset), flags, 0o600)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            _close(self._file)
            self._file = -1


def _close(file: int) -> None:
    """Close a file. A file server may report lost data at this point; the descriptor is closed
    anyway.
    """
    with suppress(OSError):
        os.close(file)


def _piece(path: Path, offset: int) -> Path:
    return path.with_name(f"{path.name}.{offset}") if offset else path


def pieces(path: Path) -> list[tuple[int, Path]]:
    """Return (offset of its first byte, file) of each existing piece of a log, in order."""
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
    """Return the total number of bytes ever written to a log.

    Raises OSError if it does not exist.
    """
    offset, last = max(pieces(path), default=(0, path))
    return offset + last.stat().st_size


def read(path: Path, offset: int, size: int) -> bytes:
    """Return `size` bytes of a log from `offset` on, with a line of text for each gap.

    Raises OSError.
    """
    found = _part(path, offset, size)
    if len(found) == size:
        return found
    # Not all of it is in the first piece, so read from all.
    until = offset + size
    found = b""
    for start, piece in pieces(path):
        if start >= until:
            break
        with suppress(FileNotFoundError):  # just removed
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


def open_all(path: Path, stack: ExitStack) -> list[tuple[BinaryIO, int]]:
    """Return (file, size) of all parts of a log, including texts for gaps; [] if there are none.

    Raises OSError.
    """
    found: list[tuple[BinaryIO, int]] = []
    reached = 0
    for start, piece in pieces(path):
        with suppress(FileNotFoundError):  # just removed
            file = stack.enter_context(piece.open("rb"))
            size = os.fstat(file.fileno()).st_size
            gap = _gap(start - reached)
            if gap:
                found.append((io.BytesIO(gap), len(gap)))
            found.append((file, size))
            reached = start + size
    return found


def lines(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield the complete lines of a log, as far as they still exist, starting at a line's
    offset.
    """
    there = pieces(path)
    # Each piece ends where the next one starts.
    ends = [start for start, _ in there[1:]]
    for number, (start, piece) in enumerate(there):
        if number < len(ends) and ends[number] <= offset:
            continue
        with suppress(FileNotFoundError), piece.open("rb") as file:
            file.seek(max(0, offset - start))
            yield from (line for line in file if line.endswith(b"\n"))
