"""The connections of notebooks that follow a job: each receives the journal and sends requests."""

from __future__ import annotations

import socket
import time

from distmagic.remote.records.journal import Journal
from distmagic.remote.wire import protocol
from distmagic.remote.wire.lines import Lines

_CHUNK_BYTES = 64 << 10
_TURN_S = 0.1  # time limit for one reader in one turn: the agent has other work
# Time limit for a reader that takes nothing after `Final`, or while another one connects: its
# network is cut, and its end was not reported.
STALLED_S = 5.0


class Reader:
    """One connection. It receives no event before its `FollowJob` has set the first one.

    `is_open` is False once the other side has closed it, or has sent an invalid message.
    """

    def __init__(self, conn: socket.socket, now: float) -> None:
        conn.setblocking(False)
        self.conn = conn
        self.is_open = True
        self._progress_at = now  # when it last took bytes, or had none to take
        self._lines = Lines()
        self._unsent = b""
        # The number of the last event that was sent or is in `_unsent`; None before `FollowJob`.
        self._cursor: int | None = None
        self._wants_news = False

    def receive(self, last: int) -> list[protocol.Message]:
        """Return the requests that have arrived.

        `last` is the number of the journal's latest event.
        """
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
        found = []
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
        """Send as much of the journal as the connection takes without blocking, within the time
        limit of a turn.

        Raises OSError if the journal can't be read.
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
        """Whether bytes are pending, and the reader has taken none for long."""
        return bool(self._unsent) and now - self._progress_at > STALLED_S

    def answer(self, message: protocol.Message) -> None:
        """Send a message to this reader only.

        It is not an event: it has no number, and is not in the journal.
        """
        self._unsent += protocol.encode(message)

    def tell(self, news: protocol.Hardware) -> None:
        """Send information that is no event, unless this reader takes nothing now."""
        if self._wants_news and not self._unsent:
            self.answer(news)

    def has_all(self, journal: Journal) -> bool:
        """Whether every event was passed to the connection; also True for a closed one."""
        if not self.is_open:
            return True
        return not self._unsent and self._cursor == journal.last

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self.conn.close()
