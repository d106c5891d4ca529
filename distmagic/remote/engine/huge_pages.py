"""Moves this process's memory to huge pages, so that forks of it take a third of the time.

A fork copies an entry for each page, and the end of the child removes it: 38,000 for a Python with
torch. A huge page of 2 MiB has one entry. After the fork, a child that writes still copies only
4 KiB.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

_MADV_COLLAPSE = 25  # madvise(2), since Linux 6.1
_BYTES = 2 << 20


def collapse() -> Iterator[bool]:
    """Move 2 MiB of memory in each step, which takes about 5 ms, and yield True.

    Memory that the kernel does not move stays as it is; before Linux 6.1 that is all of it.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin, end in _own_memory():
        for address in range(-(-begin // _BYTES) * _BYTES, end - _BYTES + 1, _BYTES):
            madvise(address, _BYTES, _MADV_COLLAPSE)
            yield True


def _own_memory() -> Iterator[tuple[int, int]]:
    """Yield the areas that can be written and belong to no file: their first byte, and the end."""
    # As bytes: the name of a mapped file may be no text.
    maps = Path("/proc/self/maps").read_bytes()
    for begin, end in re.findall(rb"(?m)^(\w+)-(\w+) .w\S+ \S+ \S+ 0\b", maps):
        yield int(begin, 16), int(end, 16)
