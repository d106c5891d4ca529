"""One pipe of a rank: all that comes out of it goes to the rank's log, and an event says where it stands there.

Where the disk is full the text goes with the event instead, and the log says later how much of it is missing.
"""

from __future__ import annotations

import os
from pathlib import Path

from distmagic.remote.records import logs, places
from distmagic.remote.records.journal import decode, log_name
from distmagic.remote.wire import protocol

_BURST_BYTES = 128 << 10  # text sent at once (as JSON up to six times as much, and MAX_LINE_BYTES holds), and
_STEADY_BYTES_S = 128 << 10  # text sent a second: more than anybody reads; the log has all of it
_READ_BYTES = 1 << 20
_READS = 4


class RankStream:
    """The reading end of stdout or stderr of one rank; rank -1 is torchrun itself."""

    def __init__(self, fd: int, folder: Path, rank: int, stream: str, now: float) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.rank = rank
        self.stream = stream
        self._log = logs.Log(folder / log_name(rank, stream), places.log_limit_bytes())
        self._told = self._log.end  # a restarted rank goes on in the same log
        self._tail = b""
        self._unlogged = bytearray()  # what the disk did not take and no event has told yet, or the end of it
        self._unlogged_bytes = 0
        self._missing_bytes = 0  # in the log, since the disk was full
        self._budget = float(_BURST_BYTES)
        self._at = now
        self.is_open = True

    @property
    def error(self) -> str:
        """Why the disk takes nothing at present, "" if it does."""
        return self._log.error

    def drain(self) -> bool:
        """Move what is there to the log; return whether anything came. `is_open` is False after end of file."""
        try:
            data = os.read(self.fd, _READ_BYTES) if self.is_open else b""
        except BlockingIOError:
            return False
        if not data:
            self.is_open = False
            return False
        written = self._keep(data)
        self._tail = (self._tail + data[:written])[-4:]
        lost = data[written:]
        self._missing_bytes += len(lost)
        self._unlogged_bytes += len(lost)
        self._unlogged = (self._unlogged + lost)[-_BURST_BYTES:]
        return True

    def _keep(self, data: bytes) -> int:
        """Write to the log what the disk takes, after a line that says what is missing where that is so."""
        if self._unlogged:
            return 0  # it is told first: events come in the order of the text
        if self._missing_bytes:
            note = f"\n[distmagic: {self._missing_bytes:,} bytes are missing in this log: the disk was full]\n".encode()
            if not self._log.append(note, whole=True):
                return 0
            self._missing_bytes = 0
        return self._log.append(data)

    def drain_all(self) -> None:
        """Move all that is in the pipe, but no more than that: a child of the rank may go on writing for ever."""
        for _ in range(_READS):
            if not self.drain():
                return

    def event(self, now: float, *, last: bool = False) -> protocol.Output | None:
        """Return an event for what came since the one before, None for nothing. `last`: a torn letter goes too.

        Where the disk was full there are two: what the log has, and what it has not.
        """
        end = self._log.end
        if not last and not self._unlogged:
            end -= _torn(self._tail)
        self._budget = min(_BURST_BYTES, self._budget + (now - self._at) * _STEADY_BYTES_S)
        self._at = now
        size = end - self._told
        if size > 0:
            sent = self._spend(size)
            self._told = end
            return protocol.Output(
                rank=self.rank, stream=self.stream, offset=end - sent, skipped_bytes=size - sent, size_bytes=sent
            )
        return self._unlogged_event() if self._unlogged else None

    def _spend(self, size: int) -> int:
        sent = min(size, max(4096, int(self._budget)))
        self._budget -= sent
        return sent

    def _unlogged_event(self) -> protocol.Output:
        sent = self._spend(len(self._unlogged))
        skipped = self._unlogged_bytes - sent
        text = decode(bytes(self._unlogged[-sent:]), torn=skipped > 0)
        self._unlogged, self._unlogged_bytes = bytearray(), 0
        return protocol.Output(rank=self.rank, stream=self.stream, offset=self._told, text=text, skipped_bytes=skipped)

    def close(self) -> None:
        """Close both ends."""
        self.is_open = False
        self._keep(b"")  # the last chance to say what is missing
        os.close(self.fd)
        self._log.close()


def _torn(tail: bytes) -> int:
    """Return how many bytes at the end are the beginning of an unfinished UTF-8 character."""
    for back in range(1, min(4, len(tail) + 1)):
        byte = tail[-back]
        if byte & 0xC0 == 0xC0:
            length = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4
            return back if back < length else 0
        if byte & 0x80 == 0:
            return 0
    return 0
