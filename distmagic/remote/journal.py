"""The journal of one node of a job: every event, numbered from 1, on disk before it is sent.

Text that ranks write stands in their logs; the journal holds its place there, and `expand` puts it back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from distmagic.remote import protocol

FILE = "journal.jsonl"
_IN_MEMORY_BYTES = 4 << 20


def log_name(rank: int, stream: str) -> str:
    """Return the file name of a rank's log (rank -1: torchrun's own)."""
    return f"rank{rank}.{stream}.log" if rank >= 0 else f"torchrun.{stream}.log"


class Journal:
    """The writing end. A disk that is full makes no job fail: the events are kept in memory, as many as fit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._recent: list[bytes] = []
        self._recent_bytes = 0
        self._first = 1  # the number of _recent[0]
        self.last = 0
        self.error = ""

    def add(self, message: protocol.Message) -> None:
        """Number an event, write it, and keep it at hand for readers."""
        self.last += 1
        line = protocol.encode(message, self.last)
        try:
            os.write(self._file, line)
        except OSError as error:
            self.error = str(error)
        self._recent.append(line)
        self._recent_bytes += len(line)
        while self._recent_bytes > _IN_MEMORY_BYTES:
            self._recent_bytes -= len(self._recent.pop(0))
            self._first += 1

    def after(self, n: int, max_bytes: int) -> tuple[int, bytes]:
        """Return some lines after number `n`, with their text, and the number of the last of them."""
        if n + 1 < self._first:
            lines = list(read(self._folder / FILE, n, self._first - 1))
        else:
            lines = [(self._first + i, self._recent[i]) for i in range(n + 1 - self._first, len(self._recent))]
        found = bytearray()
        for number, line in lines:
            if len(found) > max_bytes:
                break
            found += expand(line, self._folder)
            n = number
        return n, bytes(found)

    def touch(self) -> None:
        """Make the journal look young, so that nobody expires it while the job lives."""
        os.utime(self._folder / FILE)


def read(path: Path, after: int, last: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of a journal on disk; a torn last line is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if last is not None and number > last:
                return
            if number > after and line.endswith(b"\n"):
                yield number, line


def expand(line: bytes, folder: Path) -> bytes:
    """Return a line as it travels: an output event with its text out of the log."""
    if not line.startswith(b'{"t":"output"'):
        return line
    n, event = protocol.decode(line)
    try:
        with (folder / log_name(event.rank, event.stream)).open("rb") as log:
            log.seek(event.offset)
            text = log.read(event.size_bytes).decode(errors="replace")
    except OSError as error:
        text = f"[distmagic: the log can't be read: {error}]\n"
    return protocol.encode(replace(event, text=text, size_bytes=0), n)
