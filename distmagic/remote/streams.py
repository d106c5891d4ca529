"""One pipe of a rank: all that comes out of it goes to the rank's log, and an event says where it stands there."""

from __future__ import annotations

import os
from pathlib import Path

from distmagic.remote import protocol
from distmagic.remote.journal import log_name

_BURST_BYTES = 128 << 10  # text sent at once (as JSON up to six times as much, and MAX_LINE_BYTES holds), and
_STEADY_BYTES_S = 128 << 10  # text sent a second: more than anybody reads; the log has all of it
_READ_BYTES = 1 << 20
_READS = 4


class Stream:
    """The reading end of stdout or stderr of one rank; rank -1 is torchrun itself."""

    def __init__(self, fd: int, folder: Path, rank: int, stream: str, now: float) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.rank = rank
        self.stream = stream
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._log = os.open(folder / log_name(rank, stream), flags, 0o600)
        self._end = os.fstat(self._log).st_size  # a restarted rank goes on in the same log
        self._told = self._end
        self._tail = b""
        self._budget = float(_BURST_BYTES)
        self._at = now
        self.is_open = True
        self.lost_bytes = 0

    def drain(self) -> bool:
        """Move what is there to the log; return whether anything came. `is_open` is False after end of file."""
        try:
            data = os.read(self.fd, _READ_BYTES) if self.is_open else b""
        except BlockingIOError:
            return False
        if not data:
            self.is_open = False
            return False
        try:
            written = os.write(self._log, data)
        except OSError:
            written = 0  # a full disk: the rank goes on, and the agent says that output is lost
        self.lost_bytes += len(data) - written
        self._end += written
        self._tail = (self._tail + data[:written])[-4:]
        return True

    def drain_all(self) -> None:
        """Move all that is in the pipe, but no more than that: a child of the rank may go on writing for ever."""
        for _ in range(_READS):
            if not self.drain():
                return

    def event(self, now: float, *, last: bool = False) -> protocol.Output | None:
        """Return an event for what came since the one before, None for nothing. `last`: a torn letter goes too."""
        end = self._end if last else self._end - _torn(self._tail)
        size = end - self._told
        self._budget = min(_BURST_BYTES, self._budget + (now - self._at) * _STEADY_BYTES_S)
        self._at = now
        if size <= 0:
            return None
        sent = min(size, max(4096, int(self._budget)))
        self._budget -= sent
        self._told = end
        return protocol.Output(
            rank=self.rank, stream=self.stream, offset=end - sent, skipped_bytes=size - sent, size_bytes=sent
        )

    def close(self) -> None:
        """Close both ends."""
        self.is_open = False
        os.close(self.fd)
        os.close(self._log)


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
