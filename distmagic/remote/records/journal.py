"""The journal of one node of a job: every event, numbered from 1, on disk before it is sent.

Reports and output are in one file, and events about the course of the job in another. So ranks that
report and print for weeks fill a separate limit (logs.py). Readers get both files merged, in the
order of the numbers. The ranks' output is in their logs; the journal has its position there, and
`expand` inserts the text.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from distmagic.remote.records import logs
from distmagic.remote.wire import protocol

FILE = "journal.jsonl"
CHATTER_FILE = "chatter.jsonl"
LIMIT_BYTES = 16 << 20  # a job that is restarted a thousand times stays below it
CHATTER_LIMIT_BYTES = 64 << 20
_CHATTER = (
    protocol.Progress,
    protocol.Output,
    protocol.Picture,
    protocol.Stacks,
    protocol.StacksDone,
)
_LAST_WORDS = (protocol.Ended, protocol.EngineEnded, protocol.Final)
# The number of an event, and its line.
Numbered = tuple[int, bytes]
# a file that is removed when the disk is full, to make room for the end of the job
_RESERVE = "reserve"
_RESERVE_BYTES = 256 << 10
_IN_MEMORY_BYTES = 4 << 20
_MARK_EVERY = 256  # events
_NUMBER = re.compile(rb'{"t":"[a-z_]+","n":([0-9]+)')


def log_name(rank: int, stream: str) -> str:
    """Return the file name of a rank's log (rank -1 is torchrun itself)."""
    name = f"rank{rank}" if rank >= 0 else "torchrun"
    return f"{name}.{stream}.log"


class Journal:
    """The writing end. A full disk does not fail a job: events are kept in memory, as many as
    fit.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._main = logs.Log(folder / FILE, LIMIT_BYTES)
        self._chatter = logs.Log(folder / CHATTER_FILE, CHATTER_LIMIT_BYTES)
        # The positions in the two files after event 0, 256, 512 ...
        self._marks = [(0, 0)]
        # Events about the course of the job that the disk has not accepted yet.
        self._owed: deque[Numbered] = deque()
        self._recent: deque[bytes] = deque()
        self._recent_bytes = 0
        self._first = 1  # the number of _recent[0]
        self.last = 0
        with suppress(OSError):
            (folder / _RESERVE).touch(mode=0o600)
            (folder / _RESERVE).write_bytes(bytes(_RESERVE_BYTES))

    @property
    def error(self) -> str:
        """Why the disk rejects data now, "" if it does not."""
        return self._main.error or self._chatter.error

    def add(self, message: protocol.Message) -> None:
        """Number an event, write it, and keep it in memory for readers."""
        self.last += 1
        line = protocol.encode(message, self.last)
        if isinstance(message, _CHATTER):
            self._chatter.append(line, whole=True)
        else:
            self._owed.append((self.last, line))
        self.settle(at_all_costs=isinstance(message, _LAST_WORDS))
        if isinstance(message, protocol.Final):
            self._give_reserve()
        if self.last % _MARK_EVERY == 0:
            self._marks.append((self._main.end, self._chatter.end))
        self._recent.append(line)
        self._recent_bytes += len(line)
        while self._recent_bytes > _IN_MEMORY_BYTES:
            self._recent_bytes -= len(self._recent.popleft())
            self._first += 1

    def notice(self, text: str) -> None:
        """Add an event with a text for the user."""
        self.add(protocol.Notice(text=text))

    def settle(self, *, at_all_costs: bool = False) -> None:
        """Write the events for which the disk had no room, if it has room now.

        `at_all_costs` frees the reserve.
        """
        while self._owed:
            if self._main.append(self._owed[0][1], whole=True):
                self._owed.popleft()
            elif not (at_all_costs and self._give_reserve()):
                break
        while sum(len(line) for _, line in self._owed) > _IN_MEMORY_BYTES:
            self._owed.popleft()

    def _give_reserve(self) -> bool:
        with suppress(OSError):
            (self.folder / _RESERVE).unlink()
            return True
        return False

    def after(self, n: int, max_bytes: int) -> Numbered:
        """Return the number of the last event returned, and the lines of the events after number
        `n`.

        The line of an output event includes its text. The line at which `max_bytes` are exceeded is
        the last one; call again for the rest. A `Skipped` replaces events that are neither on disk
        nor in memory any more.
        """
        found = bytearray()
        for number, line in _without_gaps(self._lines(n), n, self.last):
            found += expand(line, self.folder)
            n = number
            if len(found) > max_bytes:
                break
        return n, bytes(found)

    def _lines(self, after: int) -> Iterator[Numbered]:
        if after + 1 < self._first:
            # The folder was removed: a `Skipped` replaces its events.
            with suppress(FileNotFoundError):
                for number, line in read(
                    self.folder, after, self._marks[after // _MARK_EVERY], self._owed
                ):
                    if number >= self._first:
                        break
                    yield number, line
        for number in range(max(after + 1, self._first), self.last + 1):
            yield number, self._recent[number - self._first]


def _without_gaps(
    lines: Iterable[Numbered], after: int, last: int = 0
) -> Iterator[Numbered]:
    """Yield (number of the last event, line), with a `Skipped` for events missing after number
    `after`.
    """
    for number, line in lines:
        if number > after + 1:
            skipped = protocol.Skipped(through=number - 1)
            yield number - 1, protocol.encode(skipped, after + 1)
        yield number, line
        after = number
    if last > after:
        yield last, protocol.encode(protocol.Skipped(through=last), after + 1)


def read(
    folder: Path,
    after: int = 0,
    mark: tuple[int, int] = (0, 0),
    owed: Iterable[Numbered] = (),
) -> Iterator[Numbered]:
    """Yield (number, line) of the events after number `after` on disk, starting from positions in
    the two files.

    An incomplete last line is left out. `owed` are events that belong to the files but are not
    written yet.
    """
    main_offset, chatter_offset = mark
    main = _numbered(logs.lines(folder / FILE, main_offset))
    chatter = _numbered(logs.lines(folder / CHATTER_FILE, chatter_offset))
    for number, line in heapq.merge(main, chatter, tuple(owed)):
        if number > after:
            yield number, line


def hello(folder: Path) -> protocol.Hello | None:
    """Return the first event of a journal, which identifies its node; None if it is missing or
    incomplete.
    """
    try:
        with (folder / FILE).open("rb") as file:
            _, first = protocol.decode(file.readline(protocol.MAX_LINE_BYTES))
    except (OSError, ValueError):
        return None
    return first if isinstance(first, protocol.Hello) else None


def replay(folder: Path, after: int) -> Iterator[bytes]:
    """Yield the lines of all events after number `after` of a job that has ended, as
    `Journal.after` returns them.
    """
    for _, line in _without_gaps(read(folder, after), after):
        yield expand(line, folder)


def _numbered(lines: Iterable[bytes]) -> Iterator[Numbered]:
    for line in lines:
        if found := _NUMBER.match(line):
            yield int(found[1]), line


def expand(line: bytes, folder: Path) -> bytes:
    """Return a line as it is sent: an output event includes its text from the log."""
    if not line.startswith(b'{"t":"output"'):
        return line
    n, event = protocol.decode(line)
    assert isinstance(event, protocol.Output)
    if not event.size_bytes:
        return line  # the log could not store it: the line has the text
    try:
        data = logs.read(
            folder / log_name(event.rank, event.stream), event.offset, event.size_bytes
        )
    except OSError as error:
        data = f"[distmagic: the log can't be read: {error}]\n".encode()
    text = decode(data, torn=event.skipped_bytes > 0)
    return protocol.encode(replace(event, text=text, size_bytes=0), n)


def decode(data: bytes, *, torn: bool) -> str:
    """Return text; `torn`: an incomplete character at its start is left out."""
    start = 0
    if torn:
        # A character continues with at most three bytes of UTF-8 (10xxxxxx).
        while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
            start += 1
    return data[start:].decode(errors="replace")
