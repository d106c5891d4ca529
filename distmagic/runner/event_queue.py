"""The queue between the threads of a run and its loop."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from distmagic.remote.wire import protocol
from distmagic.state.events import Event, Launched

# Limit for unread bytes of one node; a host that sends more is not read until the loop catches up.
_AHEAD_BYTES = 1 << 20
_LEAST_BYTES = 4096  # minimum size that an event counts as: so at most 256 wait
# Per node, if there are many: folding one event costs as much as folding all that nodes send
# meanwhile.
_GATHER_S = 0.0003
_MANY = 8


class EventQueue:
    """Events of all nodes, limited in size for each node.

    `clock` gives the seconds since the start of the run.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Each with the size that it counts as.
        self._events: queue.SimpleQueue[tuple[Event, int]] = queue.SimpleQueue()
        self._unread_bytes: Counter[int] = Counter()  # by node
        self._has_less = threading.Condition()  # protects these bytes
        self._is_over = False

    def put(
        self, node_rank: int, what: protocol.Message | Launched, size_bytes: int = 0
    ) -> None:
        """Queue an event of a node, whose line had so many bytes.

        Blocks while too much of this node is unread. Never call it on the thread that calls
        `batch`: that would deadlock.
        """
        counted = max(_LEAST_BYTES, size_bytes)
        with self._has_less:
            unread = self._unread_bytes
            while unread[node_rank] and unread[node_rank] + counted > _AHEAD_BYTES:
                if self._is_over:
                    return
                self._has_less.wait(1.0)
            unread[node_rank] += counted
        event = Event(node_rank=node_rank, at_s=self._clock(), what=what)
        self._events.put((event, counted))

    def tell(self, what: Any, node_rank: int = 0) -> None:
        """Queue the result of an action, or an event of the notebook's side. Never blocks."""
        event = Event(node_rank=node_rank, at_s=self._clock(), what=what)
        self._events.put((event, 0))

    def wake(self) -> None:
        """Make `batch` return now."""
        self.tell(None)

    def batch(self, timeout_s: float) -> list[Event]:
        """Wait for events at most `timeout_s`, and return them; [] for none."""
        found = []
        try:
            found.append(self._events.get(timeout=timeout_s))
            nodes = len(self._unread_bytes)
            if nodes >= _MANY:
                time.sleep(_GATHER_S * nodes)
            while len(found) < 100_000:
                found.append(self._events.get_nowait())
        except queue.Empty:
            pass
        with self._has_less:
            for event, counted in found:
                if counted:
                    self._unread_bytes[event.node_rank] -= counted
            self._has_less.notify_all()
        return [event for event, _ in found]

    def close(self) -> None:
        """Release all threads that wait for space."""
        self._is_over = True
