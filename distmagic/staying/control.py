"""Passes requests and events between a cell on ranks that stay and the loop of their session."""

from __future__ import annotations

import queue
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from distmagic.connection.link import Link
from distmagic.remote.wire import protocol
from distmagic.runner.actions import Send
from distmagic.state.events import Event
from distmagic.staying import past
from distmagic.staying.past import Past

_MOST_BETWEEN = 100  # events


class Control:
    """The connection of one session.

    Its loop's thread calls `hear` and `sends`; the thread of a cell calls everything else. `past`
    is what the session's events tell of its cells so far. `ends_idle_s` as for `Companion`.
    """

    def __init__(self, ends_idle_s: float | None = None) -> None:
        self.ends_idle_s = ends_idle_s
        self.past = Past()
        self.kernel = secrets.token_hex(4)
        # Whether ranks run another kernel's cell instead of this kernel's last one.
        self.is_refused = False
        self.last = 0  # the number of the last cell of this kernel, or before it
        self._lock = threading.Lock()
        self._cell: protocol.RunCell | None = None
        self._sent_over: dict[int, Link] = {}
        self._others: list[protocol.HandedOn] = []
        self._again: list[protocol.HandedOn] = []  # sent ones that a new link needs
        self._heard: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
        # What ranks printed while they ran no cell: their next one of the user shows it.
        self._between: list[Event] = []
        self._wake: Callable[[], None] = lambda: None
        # Python versions of the hosts.
        self.pythons: frozenset[tuple[int, ...]] = frozenset()

    def join(self, wake: Callable[[], None]) -> None:
        """Register `wake`, which wakes the session's loop."""
        self._wake = wake

    def begin(self, cell: protocol.RunCell) -> None:
        """Start a cell, and collect events from now on."""
        with self._lock:
            self._begin(cell)
        self._wake()

    def _begin(self, cell: protocol.RunCell) -> None:
        self._cell = cell
        self.last = cell.cell
        self._sent_over = {}
        self._again = []
        self._heard = queue.SimpleQueue()
        if cell.text:
            held = tuple(self._between)
            self._heard.put([one for one in held if _is_seen_in(cell, one)])
            self._between.clear()
            self._between += (one for one in held if not _is_seen_in(cell, one))

    def take_over(self) -> Past:
        """Let the session be this kernel's, whoever ran its cells so far; return these.

        A cell that still runs goes on as this kernel's.
        """
        with self._lock:
            self.last = self.past.last
            self.is_refused = False
            self._between.clear()
            if at_work := self.past.at_work:
                self._begin(protocol.RunCell(cell=self.last, ranks=at_work))
            return self.past

    @property
    def is_taken(self) -> bool:
        """Whether another kernel has run a cell since this one did."""
        return self.is_refused or self.past.last > self.last

    def ask(self, request: protocol.HandedOn) -> None:
        """Send ranks a request about their cell, such as an interrupt."""
        with self._lock:
            self._others.append(request)
        self._wake()

    def end(self) -> None:
        """Mark the end of the cell."""
        with self._lock:
            cell, self._cell = self._cell, None
            # What came after the last look.
            for one in _printed(self.heard(0.0)):
                if cell is not None and _is_seen_in(cell, one):
                    self._keep(one)

    def heard(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call, after waiting at most `timeout_s` for one."""
        found: list[Event] = []
        try:
            found += self._heard.get(timeout=timeout_s)
            while True:
                found += self._heard.get_nowait()
        except queue.Empty:
            return found

    def hear(self, events: Sequence[Event]) -> None:
        """Pass events to the running cell."""
        with self._lock:
            self.past = past.take(self.past, events)
            cell = self._cell
            if cell is not None:
                self.is_refused |= any(_refuses(cell, one.what) for one in events)
                self._heard.put(events)
            for one in _printed(events):
                if cell is None or not _is_seen_in(cell, one):
                    self._keep(one)

    def _keep(self, event: Event) -> None:
        """Keep what a rank printed for its next cell. A rank that prints much loses its own first
        lines, and no other rank's.
        """
        self._between.append(event)
        if len(self._between) > _MOST_BETWEEN:
            ranks = [getattr(one.what, "rank", -1) for one in self._between]
            [(rank, _)] = Counter(ranks).most_common(1)
            del self._between[ranks.index(rank)]

    def sends(self, links: Mapping[int, Link]) -> list[Send]:
        """Return the messages to send now: each request once, and over each new link the cell and
        its interrupts again, because they may be lost with the old link. Ranks ignore repeats.
        """
        self.pythons |= {link.python for link in links.values()}
        with self._lock:
            found = []
            new = [
                link
                for node, link in links.items()
                if self._sent_over.get(node) is not link
            ]
            if self._cell is not None and new:
                self._sent_over.update(links)
                for again in (self._cell, *self._again):
                    found.append(Send(links=tuple(new), message=again))
            for request in self._others:
                found.append(Send(links=tuple(links.values()), message=request))
                if isinstance(request, protocol.InterruptCell | protocol.OthersEnded):
                    self._again.append(request)
            self._others = []
            return found


def _printed(events: Iterable[Event]) -> Iterator[Event]:
    return (one for one in events if isinstance(one.what, protocol.Output))


def _is_seen_in(cell: protocol.RunCell, event: Event) -> bool:
    """Whether a cell's view shows this output: it is of a rank of the cell, or of torchrun."""
    rank = getattr(event.what, "rank", -1)
    return rank < 0 or rank in cell.ranks


def _refuses(cell: protocol.RunCell, what: object) -> bool:
    """Whether a rank reports that it runs another kernel's cell instead of this one."""
    if not isinstance(what, protocol.CellBegan) or what.cell != cell.cell:
        return False
    # Ranks of an older version report no kernel.
    return bool(cell.kernel) and what.kernel not in ("", cell.kernel)
