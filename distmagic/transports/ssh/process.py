"""A process on a host with the `Process` interface: one channel of an SSH session."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from distmagic.errors import ConnectionLost
from distmagic.remote.system import threads
from distmagic.transports.piped import Tail

# what fits a packet: larger pieces would be copied for every packet
_PIECE_BYTES = 32768


class SshProcess:
    """A process on host `name`: one channel of paramiko's.

    `broken` are the exceptions of a closed channel.
    """

    def __init__(
        self, channel: Any, name: str, broken: tuple[type[Exception], ...]
    ) -> None:
        self._channel = channel
        self._broken = broken
        self._name = name
        self._tail = Tail()
        self._writing = threading.Lock()
        self.is_closed = False
        self._drainer = threads.begin(f"stderr-{name}", self._drain)

    def _drain(self) -> None:
        """Read stderr all the time: it shares its flow control with stdout, which would block."""
        # Reading also sends, which fails when the connection ends just then.
        with suppress(*self._broken):
            while data := self._channel.recv_stderr(_PIECE_BYTES):
                self._tail.append(data)

    def write(self, data: bytes) -> None:
        """Send all of `data`. Raises `ConnectionLost` if the other end is gone."""
        view = memoryview(data)
        try:
            with self._writing:
                while view:
                    sent = self._channel.send(bytes(view[:_PIECE_BYTES]))
                    if sent == 0 or not self._channel.transport.is_active():
                        raise EOFError
                    view = view[sent:]
        except self._broken:
            raise ConnectionLost(
                f"{self._name}: the process or the connection no longer takes input."
            ) from None

    def read(self, max_bytes: int = 65536) -> bytes:
        """Return bytes as soon as there are any; b"" at end of file, after `close` or when the
        connection is lost.
        """
        if self.is_closed:
            return b""
        try:
            data = bytes(self._channel.recv(max_bytes))
        except self._broken:
            return b""
        return b"" if self.is_closed else data

    def stderr(self) -> str:
        """Return the end of its stderr; all of it once it has ended."""
        if self._channel.status_event.is_set():
            self._drainer.join(0.2)
        return self._tail.text()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return its exit code; None if still running, ended by a signal, or if the connection
        ended first.
        """
        if not self._channel.status_event.wait(timeout_s):
            return None
        status = int(self._channel.exit_status)
        return None if status == -1 else status

    def close_stdin(self) -> None:
        """Close the process's stdin, after the bytes that are being written."""
        with self._writing, suppress(*self._broken):
            self._channel.shutdown_write()

    def close(self) -> None:
        """Close the channel; a blocked read or write returns. The process itself may run on."""
        self.is_closed = True
        with suppress(*self._broken):
            self._channel.close()
