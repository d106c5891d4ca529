"""A parcel's large values in separate files next to it, named by their SHA-256.

An unchanged value keeps its file name whatever else changes, so it is not sent again.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Sequence
from typing import Any

LARGE_BYTES = 1 << 20
# Limit of side files for one parcel: each uses a descriptor while it is mapped.
AT_MOST = 64


def grouped(sizes: Sequence[int]) -> list[list[int]]:
    """Return groups of values that share a side file, by index; ungrouped values stay in the
    parcel.

    A large value has its own side file. Small ones share files with their neighbours, so that a
    change of one affects few others. The more bytes in total, the larger a value must be for its
    own file: there are at most `AT_MOST` side files.
    """
    large = LARGE_BYTES
    while sum(sizes) > AT_MOST * large:
        large *= 2
    groups = []
    waiting = []
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


def mapped(path: str | os.PathLike[str]) -> memoryview:
    """Return the bytes of a file, memory-mapped; changes stay private. Raises OSError."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")  # an empty file can't be mapped
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


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
