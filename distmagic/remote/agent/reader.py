"""The connections over which notebooks follow a job: each is sent the journal and sends requests."""

from __future__ import annotations

import socket
import time

from distmagic.remote.records.journal import Journal
from distmagic.remote.wire import protocol
from distmagic.remote.wire.lines import Lines

_CHUNK_BYTES = 64 << 10
_TURN_S = 0.1  # for one reader in one turn: the agent has other duties
# For a reader that takes nothing after `Final`, or while another one connects: its network is cut, and no end was
# reported.
STALLED_S = 5.0


class Reader:
    """One connection. No event is sent before its `FollowJob` says which event comes first.

    `is_open` is False once the other side has closed it, or has sent something that is not of the protocol.
    """

    def __init__(self, conn: socket.socket, now: float) -> None:
        conn.setblocking(False)
        self.conn = conn
        self.is_open = True
        self._progress_at = now  # when it took bytes, or had none to take
        self._lines = Lines()
        self._unsent = b""
        # The number of the last event in `_unsent`, or sent; None before `FollowJob`.
        self._cursor: int | None = None
        self._wants_news = False

    def receive(self, last: int) -> list[protocol.Message]:
        """Return the requests that have arrived. `last` is the number of the journal's latest event."""
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
        found: list[protocol.Message] = []
        try:
            while (line := self._lines.line()) is not None:
                _, message = protocol.decode(line)
                if isinstance(message, protocol.FollowJob):
                    self._cursor = last if message.live else message.after
                    self._wants_news = not message.live
                found.append(message)
        except protocol.BadLine:
            self.is_open = False
            return []
        return found

    def send(self, journal: Journal, now: float) -> None:
        """Send as much of the journal as the connection takes without blocking, and as a turn has time for.

        Raises OSError where the journal can't be read.
        """
        until_s = time.monotonic() + _TURN_S
        while self.is_open and time.monotonic() < until_s:
            if (
                not self._unsent
                and self._cursor is not None
                and self._cursor < journal.last
            ):
                self._cursor, self._unsent = journal.after(self._cursor, _CHUNK_BYTES)
            if not self._unsent:
                self._progress_at = now
                return
            try:
                sent = self.conn.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self.is_open = False
                return
            self._progress_at = now
            self._unsent = self._unsent[sent:]

    def is_stalled(self, now: float) -> bool:
        """Whether there are bytes to send, and it has taken none for long."""
        return bool(self._unsent) and now - self._progress_at > STALLED_S

    def answer(self, message: protocol.Message) -> None:
        """Send a message to this reader alone. It is no event: it has no number, and the journal lacks it."""
        self._unsent += protocol.encode(message)

    def tell(self, news: protocol.Hardware) -> None:
        """Send news that is no event, unless this reader takes nothing just now."""
        if self._wants_news and not self._unsent:
            self.answer(news)

    def has_all(self, journal: Journal) -> bool:
        """Whether every event has been handed to the connection; True also of a closed one."""
        if not self.is_open:
            return True
        return not self._unsent and self._cursor == journal.last

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self.conn.close()
