"""The journal of one node of a job: every event, numbered from 1, on disk before it is sent.

Text that ranks write stands in their logs; the journal holds its place there, and `expand` puts it back.
"""

from __future__ import annotations

import errno
import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from distmagic.remote import protocol

FILE = "journal.jsonl"
_IN_MEMORY_BYTES = 4 << 20
_MARK_EVERY = 256  # events
_NUMBER = re.compile(rb'{"t":"[a-z]+","n":([0-9]+)')


def log_name(rank: int, stream: str) -> str:
    """Return the file name of a rank's log (rank -1: torchrun's own)."""
    return f"rank{rank}.{stream}.log" if rank >= 0 else f"torchrun.{stream}.log"


class Journal:
    """The writing end. A disk that is full makes no job fail: the events are kept in memory, as many as fit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = 0
        self._marks = [0]  # where in the file event 1, 257, 513 ... begins, or would
        self._recent: deque[bytes] = deque()
        self._recent_bytes = 0
        self._first = 1  # the number of _recent[0]
        self.last = 0
        self.error = ""

    def add(self, message: protocol.Message) -> None:
        """Number an event, write it, and keep it at hand for readers."""
        self.last += 1
        if self.last % _MARK_EVERY == 1 and self.last > 1:
            self._marks.append(self._size)
        line = protocol.encode(message, self.last)
        self._write(line)
        self._recent.append(line)
        self._recent_bytes += len(line)
        while self._recent_bytes > _IN_MEMORY_BYTES:
            self._recent_bytes -= len(self._recent.popleft())
            self._first += 1

    def _write(self, line: bytes) -> None:
        try:
            if os.write(self._file, line) == len(line):
                self._size += len(line)
                return
            os.ftruncate(self._file, self._size)  # the disk was full in the middle of the line
            self.error = os.strerror(errno.ENOSPC)
        except OSError as error:
            self.error = str(error)

    def after(self, n: int, max_bytes: int) -> tuple[int, bytes]:
        """Return some lines after number `n`, with their text, and the number of the last of them.

        No number is left out: an event that neither disk nor memory has any more is an empty notice.
        """
        found = bytearray()
        for number, line in self._lines(n):
            found += expand(line, self._folder)
            n = number
            if len(found) > max_bytes:
                break
        return n, bytes(found)

    def _lines(self, after: int) -> Iterator[tuple[int, bytes]]:
        next_ = after + 1
        if next_ < self._first:
            for number, line in read(self._folder / FILE, after, self._marks[after // _MARK_EVERY]):
                if number >= self._first:
                    break
                yield from _gap(next_, number)
                yield number, line
                next_ = number + 1
            yield from _gap(next_, self._first)
            next_ = self._first
        for number in range(next_, self.last + 1):
            yield number, self._recent[number - self._first]


def _gap(first: int, end: int) -> Iterator[tuple[int, bytes]]:
    for number in range(first, end):
        text = "an event was lost: the disk was full"
        yield number, protocol.encode(protocol.Notice(level="warning", text=text), number)


def read(path: Path, after: int = 0, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of the events after number `after` in a journal on disk, from a place in the file on.

    A torn last line is left out.
    """
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            found = _NUMBER.match(line)
            if found and line.endswith(b"\n") and int(found[1]) > after:
                yield int(found[1]), line


def expand(line: bytes, folder: Path) -> bytes:
    """Return a line as it travels: an output event with its text out of the log."""
    if not line.startswith(b'{"t":"output"'):
        return line
    n, event = protocol.decode(line)
    assert isinstance(event, protocol.Output)
    try:
        with (folder / log_name(event.rank, event.stream)).open("rb") as log:
            log.seek(event.offset)
            data = log.read(event.size_bytes)
    except OSError as error:
        data = f"[distmagic: the log can't be read: {error}]\n".encode()
    return protocol.encode(replace(event, text=_decode(data, torn=event.skipped_bytes > 0), size_bytes=0), n)


def _decode(data: bytes, *, torn: bool) -> str:
    """Return text; `torn`: its beginning may be the end of a character, which is left out then."""
    start = 0
    while torn and start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:].decode(errors="replace")
