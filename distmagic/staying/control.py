"""Cells of ranks that stay, beside the loop of their session: what it is to send to hosts, and what it hears of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence

from distmagic.connection.link import Link
from distmagic.remote.wire import protocol
from distmagic.runner.actions import Send
from distmagic.state.events import Event


class Control:
    """One session's. `hear` and `sends` are called on the thread of its loop, all else on that of a cell."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cell: protocol.RunCell | None = None
        self._sent_over: dict[int, Link] = {}
        self._others: list[protocol.HandedOn] = []
        self._heard: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self.pythons: frozenset[tuple[int, ...]] = frozenset()  # the hosts' versions

    def join(self, wake: Callable[[], None]) -> None:
        """Take part in a loop, which `wake` wakes."""
        self._wake = wake

    def begin(self, cell: protocol.RunCell) -> None:
        """Have a cell run, and events be heard from now on."""
        with self._lock:
            self._cell = cell
            self._sent_over = {}
            self._others = []
            self._heard = queue.SimpleQueue()
        self._wake()

    def ask(self, request: protocol.HandedOn) -> None:
        """Have ranks be asked about their cell, or interrupted at it."""
        with self._lock:
            self._others.append(request)
        self._wake()

    def end(self) -> None:
        """Let no cell run any more."""
        with self._lock:
            self._cell = None

    def heard(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call, after waiting for one at most `timeout_s`."""
        found: list[Event] = []
        try:
            found += self._heard.get(timeout=timeout_s)
            while True:
                found += self._heard.get_nowait()
        except queue.Empty:
            return found

    def hear(self, events: Sequence[Event]) -> None:
        """Hand events on to the cell that runs."""
        with self._lock:
            if self._cell is not None:
                self._heard.put(events)

    def sends(self, links: Mapping[int, Link]) -> list[Send]:
        """Return what is to be sent now: the cell over each new link, as ranks take it once; interrupts once."""
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
                found.append(Send(links=tuple(new), message=self._cell))
            for request in self._others:
                found.append(Send(links=tuple(links.values()), message=request))
            self._others = []
            return found
