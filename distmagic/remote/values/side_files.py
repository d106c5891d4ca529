"""A parcel's large values in separate files next to it, named by their SHA-256.

An unchanged value keeps its file name whatever else changes, so it is not sent again.
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
# Limit of side files for one parcel: each uses a descriptor while it is mapped.
AT_MOST = 64


@dataclass(frozen=True, kw_only=True)
class SideFile:
    """A file with values: its SHA-256 in hex, which is its name, and its size."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Value:
    """Bytes stored after a pickle: `chunks` yields them in order, `size_bytes` in total."""

    size_bytes: int
    chunks: Callable[[], Iterator[Any]]


def of_memory(memory: Any) -> Value:
    """Return a value for some contiguous memory."""
    view = memoryview(memory)
    return Value(size_bytes=view.nbytes, chunks=lambda: iter((view,)))


def grouped(sizes: Sequence[int]) -> list[list[int]]:
    """Return groups of values that share a side file, by index; ungrouped values stay in the parcel.

    A large value has its own side file. Small ones share files with their neighbours, so that a change of one affects
    few others. The more bytes in total, the larger a value must be for its own file: there are at most `AT_MOST` side
    files.
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
    """Yield a new file to write, and a function that names it; without a name the file is removed after the block.

    Its name is the hash of its bytes, which is only known at the end: `atomic_write` needs the name before.
    """
    aside = folder / f".side-file-{secrets.token_hex(8)}"
    try:
        with open(
            os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
        ) as file:

            def name(sha256: str) -> None:
                file.close()  # a file server may report errors only here
                aside.replace(folder / sha256)

            yield file, name
    finally:
        aside.unlink(missing_ok=True)


def mapped(path: Path, size_bytes: int) -> mmap.mmap:
    """Memory-map a side file; changes stay private. Raises OSError, and ValueError for an incomplete file."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != size_bytes:
            raise ValueError(f"{path} is incomplete")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class JoinedPieces(io.RawIOBase):
    """Reads pieces of memory in order, as one file."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = [piece for piece in pieces if len(piece)][::-1]

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill part of `buffer`; return 0 at the end."""
        if not self._pieces:
            return 0
        piece = self._pieces.pop()
        size = min(len(buffer), len(piece))
        buffer[:size] = piece[:size]
        if size < len(piece):
            self._pieces.append(piece[size:])
        return size
