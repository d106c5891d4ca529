"""The agent's readers: who is attached over the unix socket, how far each has read, and what it asks for."""

from __future__ import annotations

import socket

from distmagic.remote.records.journal import Journal
from distmagic.remote.wire import protocol
from distmagic.remote.wire.lines import Lines

_CHUNK_BYTES = 256 << 10


class Reader:
    """One connection. Nothing is sent before it has said from where (`FollowJob`)."""

    def __init__(self, conn: socket.socket) -> None:
        conn.setblocking(False)
        self.conn = conn
        self._lines = Lines()
        self._unsent = b""
        self._cursor: int | None = None
        self.is_open = True

    def receive(self, last: int) -> list[protocol.Message]:
        """Return what it asks for; `is_open` is False after end of file. `last`: the number of the latest event."""
        try:
            data = self.conn.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.is_open = False
            return []
        self._lines.feed(data)
        try:
            return self._requests(last)
        except protocol.BadLine:
            self.is_open = False
            return []

    def _requests(self, last: int) -> list[protocol.Message]:
        found: list[protocol.Message] = []
        while (line := self._lines.line()) is not None:
            _, message = protocol.decode(line)
            if isinstance(message, protocol.FollowJob):
                self._cursor = last if message.live else message.after
            found.append(message)
        return found

    def send(self, journal: Journal) -> None:
        """Send as much as the connection takes without blocking."""
        while self.is_open and self._fill(journal):
            try:
                sent = self.conn.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self.is_open = False
                return
            self._unsent = self._unsent[sent:]

    def _fill(self, journal: Journal) -> bool:
        if not self._unsent and self._cursor is not None and self._cursor < journal.last:
            self._cursor, self._unsent = journal.after(self._cursor, _CHUNK_BYTES)
        return bool(self._unsent)

    def tell(self, message: protocol.Message) -> None:
        """Answer this reader alone: no event."""
        self._unsent += protocol.encode(message)

    def has_all(self, journal: Journal) -> bool:
        """Whether everything has been handed to the connection."""
        return not self.is_open or (not self._unsent and self._cursor == journal.last)

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self.conn.close()
