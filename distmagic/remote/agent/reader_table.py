"""All readers of a job: accepts them, forwards their requests, and closes those that are gone or
take nothing.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from distmagic.remote.agent.reader import STALLED_S, Reader
from distmagic.remote.records.journal import Journal
from distmagic.remote.system import socket_peer
from distmagic.remote.wire import protocol


@dataclass(eq=False)
class ReaderTable:
    """The connected readers. Each request goes to `handle`, with its reader and the time.

    Nothing blocks: the agent's selector calls the methods when a descriptor is readable. `notice`
    gets each error of the journal once.
    """

    _journal: Journal
    _selector: selectors.BaseSelector
    _clock: Callable[[], float]
    _handle: Callable[[Reader, protocol.Message, float], None]
    _notice: Callable[[str], None]
    readers: list[Reader] = field(default_factory=list)
    _listener: socket.socket | None = None

    def listen(self, listener: socket.socket) -> None:
        """Accept readers from now on, only at this socket."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(
            listener, selectors.EVENT_READ, lambda: self._accept(listener)
        )

    @property
    def have_all(self) -> bool:
        """Whether each reader has received the whole journal."""
        return all(reader.has_all(self._journal) for reader in self.readers)

    def tell(self, news: protocol.Hardware) -> None:
        """Send information that is no event to all readers that take it."""
        for reader in self.readers:
            reader.tell(news)

    def send(self, now: float, final_at: float | None) -> None:
        """Send each reader its missing events; close readers that can't take them.

        A live notebook connects again.
        """
        for reader in list(self.readers):
            try:
                reader.send(self._journal, now)
            except OSError as error:
                self._notice(
                    f"can't read the journal in {self._journal.folder}: {error}"
                )
                reader.is_open = False
            is_final = final_at is not None and now - final_at > STALLED_S
            if is_final and reader.is_stalled(now):
                # Otherwise it would delay the end of the run for 15 minutes, until TCP gives up.
                reader.is_open = False
            if not reader.is_open:
                self._drop(reader)

    def _accept(self, listener: socket.socket) -> None:
        conn, _ = listener.accept()
        if not socket_peer.is_ours(conn):
            conn.close()
            return
        reader = Reader(conn, self._clock())
        self.readers.append(reader)
        self._selector.register(conn, selectors.EVENT_READ, lambda: self._serve(reader))

    def _serve(self, reader: Reader) -> None:
        now = self._clock()
        for request in reader.receive(self._journal.last):
            if isinstance(request, protocol.FollowJob):
                # A reader that takes nothing may be an old connection of the same notebook.
                for one in list(self.readers):
                    if one.is_stalled(now):
                        self._drop(one)
            self._handle(reader, request, now)
        if not reader.is_open:
            self._drop(reader)

    def _drop(self, reader: Reader) -> None:
        if reader in self.readers:
            self.readers.remove(reader)
            self._selector.unregister(reader.conn)
            reader.close()
