"""A parcel's large values in files of their own beside it, named by their SHA-256.

A value that has not changed keeps its file's name whatever else changes, so that nobody needs to be sent it again.
"""

from __future__ import annotations

import io
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGE_BYTES = 1 << 20
AT_MOST = 64  # side files of one parcel: each holds a descriptor while it is mapped


@dataclass(frozen=True, kw_only=True)
class SideFile:
    """A file with values in it: its SHA-256 in hex, which is its name, and its size."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Value:
    """Bytes that follow a pickle: `chunks` yields them in order, `size_bytes` of them."""

    size_bytes: int
    chunks: Callable[[], Iterator[Any]]


def of_memory(memory: Any) -> Value:
    """Return the value that some contiguous memory is."""
    view = memoryview(memory)
    return Value(size_bytes=view.nbytes, chunks=lambda: iter((view,)))


def grouped(sizes: Sequence[int]) -> list[list[int]]:
    """Return which values share a side file, by their numbers; those in no group stay in the parcel.

    A large value has a side file to itself. Small ones share: each only with its neighbours, so that a change of one
    touches few others. The more bytes there are in all, the larger a value must be for a file to itself: there are
    never more than `AT_MOST` side files.
    """
    large = LARGE_BYTES
    while sum(sizes) > AT_MOST * large:
        large *= 2
    groups: list[list[int]] = []
    waiting: list[int] = []
    held = 0
    for number, size in enumerate(sizes):
        if size >= large:
            groups.append([number])
        elif size:
            waiting.append(number)
            held += size
        if held >= large:
            groups.append(waiting)
            waiting, held = [], 0
    return groups


@contextmanager
def new_file(folder: Path) -> Iterator[tuple[Any, Callable[[str], None]]]:
    """Give a new file to write, and a function that names it; a file that was not named is removed after the block.

    Its name is the hash of its bytes, which is known only when all are written: `atomic_write` needs the name before.
    """
    aside = folder / f".side-file-{secrets.token_hex(8)}"
    try:
        with open(
            os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
        ) as file:

            def name(sha256: str) -> None:
                file.close()  # a server of files may refuse some of it first here
                aside.replace(folder / sha256)

            yield file, name
    finally:
        aside.unlink(missing_ok=True)


def mapped(path: Path, size_bytes: int) -> mmap.mmap:
    """Map a side file; what is written there stays private. Raises OSError, ValueError if it isn't whole."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != size_bytes:
            raise ValueError(f"{path} is incomplete")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class JoinedPieces(io.RawIOBase):
    """Reads pieces of memory one after the other, as one file."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = [piece for piece in pieces if len(piece)][::-1]

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill some of `buffer`; 0 at the end."""
        if not self._pieces:
            return 0
        piece = self._pieces.pop()
        size = min(len(buffer), len(piece))
        buffer[:size] = piece[:size]
        if size < len(piece):
            self._pieces.append(piece[size:])
        return size
