"""One pipe of a rank.

Its bytes are appended to the rank's log, and an event has their position in the log.

While the disk is full the event has the text itself, and a later note in the log has the number of
missing bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from distmagic.remote.records import logs, places
from distmagic.remote.records.journal import decode, log_name
from distmagic.remote.wire import protocol
from distmagic.remote.wire.printed_numbers import PrintedRows

# Text beyond these limits is not sent: nobody can read it live, and the log has all of it. The
# first limit is for one event; as JSON it may be six times as long, which MAX_LINE_BYTES allows.
_BURST_BYTES = 128 << 10
_STEADY_BYTES_S = 128 << 10  # per second
_LEAST_BYTES = 4096  # minimum of an event, however fast they come
_READ_BYTES = 1 << 20
_TAIL_BYTES = 40  # no colour sequence is longer
_TORN_COLOUR = re.compile(rb"\x1b(?:\[[0-9;]*)?\Z")
_READS = 4  # reads at a rank's end: a full pipe holds at most 1 MiB


class RankStream:
    """The reading end of stdout or stderr of one rank; rank -1 is torchrun itself.

    A restarted rank may have the same number as one whose children still write; then its stream,
    found in `others`, uses the same log.
    """

    def __init__(
        self, fd: int, folder: Path, rank: int, stream: str, now: float, others: Iterable[RankStream] = ()
    ) -> None:  # fmt: skip
        os.set_blocking(fd, False)
        self.fd = fd
        self.rank = rank
        self.stream = stream
        same = [one for one in others if (one.rank, one.stream) == (rank, stream)]
        self.text: _Text = same[0].text if same else _Text(folder, rank, stream, now)
        self.text.streams += 1
        self.is_open = True
        # None if no reader wants them.
        self.numbers = PrintedRows() if rank >= 0 else None

    @property
    def error(self) -> str:
        """Why the disk rejects output now, "" if it doesn't."""
        return self.text.log.error

    def drain(self) -> bool:
        """Move the pipe's bytes to the log; return whether there were any.

        `is_open` is False after end of file.
        """
        try:
            data = os.read(self.fd, _READ_BYTES) if self.is_open else b""
        except BlockingIOError:
            return False
        if not data:
            self.is_open = False
            return False
        self.text.add(data)
        if self.numbers is not None:
            self.numbers.add(data)
        return True

    def drain_all(self) -> None:
        """Move the pipe's content, but not much more: a child of the rank may write forever."""
        for _ in range(_READS):
            if not self.drain():
                return

    def event(self, now: float, *, last: bool = False) -> protocol.Output | None:
        """Return an event for the bytes since the previous one, None if there are none.

        Call until it returns None. If the disk was full, two events follow each other: first for
        the bytes in the log, then with the text that the log lacks. An incomplete UTF-8 character
        or colour sequence waits for its rest, unless `last`: the notebook removes incomplete ones.
        """
        return self.text.event(now, last=last)

    def close(self) -> None:
        """Close the pipe, and the log if no other pipe uses it."""
        self.is_open = False
        os.close(self.fd)
        self.text.streams -= 1
        if not self.text.streams:
            self.text.close()


class _Text:
    """The output of the processes of one rank to one stream: its log, and which bytes of it events
    have covered.
    """

    def __init__(self, folder: Path, rank: int, stream: str, now: float) -> None:
        self.streams = 0  # number of streams that write this text
        self.log = logs.Log(folder / log_name(rank, stream), places.log_limit_bytes())
        self._rank, self._stream = rank, stream
        # Events cover the log up to this position; a restarted rank appends to the same log.
        self._reported = self.log.end
        # The last bytes of the log: they may start a character or a colour sequence.
        self._tail = b""
        # The end of the text that the disk rejected, until an event has it.
        self._unlogged = bytearray()
        # Number of bytes that the disk rejected since that event.
        self._unlogged_bytes = 0
        # number of bytes that the log lacks, until a note in the log has it
        self._missing_bytes = 0
        self._budget = float(_BURST_BYTES)  # bytes that may be sent: a token bucket
        self._at = now

    def add(self, data: bytes) -> None:
        """Append the bytes to the log. If the disk is full, keep the rest for an event."""
        written = self._append(data)
        self._tail = (self._tail + data[:written])[-_TAIL_BYTES:]
        lost = data[written:]
        self._missing_bytes += len(lost)
        self._unlogged_bytes += len(lost)
        self._unlogged = (self._unlogged + lost)[-_BURST_BYTES:]

    def _append(self, data: bytes) -> int:
        """Write to the log, after a note about missing bytes; return how many bytes of `data` were
        written.
        """
        if self._unlogged:
            return 0  # an event must have that text first: events follow the order of the text
        if self._missing_bytes:
            note = f"\n[distmagic: {self._missing_bytes:,} bytes are missing in this log: the disk was full]\n".encode()
            if not self.log.append(note, whole=True):
                return 0
            self._missing_bytes = 0
        return self.log.append(data)

    def event(self, now: float, *, last: bool) -> protocol.Output | None:
        """Return the event of `RankStream.event`."""
        end = self.log.end
        if not last and not self._unlogged:
            end -= _torn_bytes(self._tail)
        self._budget = min(
            _BURST_BYTES, self._budget + (now - self._at) * _STEADY_BYTES_S
        )
        self._at = now
        size = end - self._reported
        if size > 0:
            sent = self._spend(size)
            self._reported = end
            return protocol.Output(
                rank=self._rank,
                stream=self._stream,
                offset=end - sent,
                skipped_bytes=size - sent,
                size_bytes=sent,
            )
        if not self._unlogged:
            return None
        sent = self._spend(len(self._unlogged))
        skipped = self._unlogged_bytes - sent
        text = decode(bytes(self._unlogged[-sent:]), torn=skipped > 0)
        self._unlogged = bytearray()
        self._unlogged_bytes = 0
        return protocol.Output(
            rank=self._rank,
            stream=self._stream,
            offset=self._reported,
            text=text,
            skipped_bytes=skipped,
        )

    def _spend(self, size: int) -> int:
        """Return how many of `size` bytes may be sent, and subtract them from the budget."""
        sent = min(size, max(_LEAST_BYTES, int(self._budget)))
        self._budget -= sent
        return sent

    def close(self) -> None:
        """Close the log."""
        self._append(b"")  # the last chance to note missing bytes
        self.log.close()


def _torn_bytes(tail: bytes) -> int:
    """Return the number of bytes at the end that belong to an incomplete UTF-8 character or colour
    sequence.
    """
    if colour := _TORN_COLOUR.search(tail):
        return len(colour[0])
    for back in range(1, min(4, len(tail) + 1)):
        byte = tail[-back]
        if byte < 0x80:  # a character of one byte
            return 0
        if byte >= 0xC0:  # the first byte of a character of 2, 3 or 4 bytes
            length = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return back if back < length else 0
    return 0
