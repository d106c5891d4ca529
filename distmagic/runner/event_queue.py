"""The queue between the threads of a run and its loop."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from distmagic.remote.wire import protocol
from distmagic.state.events import Event, Launched

# Limit for unread bytes of one node; a host that sends more is not read until the loop catches up.
_AHEAD_BYTES = 1 << 20
_LEAST_BYTES = 4096  # minimum size that an event counts as: so at most 256 wait
_GATHER_S = 0.0003  # per node: folding one event costs as much as folding all that nodes send meanwhile


class _Room:
    """Counts the unread bytes of one node."""

    def __init__(self) -> None:
        self._waiting_bytes = 0
        self._has_less = threading.Condition()

    def take(self, size_bytes: int, is_over: threading.Event) -> bool:
        """Wait until so many more bytes fit, and count them; return False if the loop no longer reads."""
        with self._has_less:
            while (
                self._waiting_bytes and self._waiting_bytes + size_bytes > _AHEAD_BYTES
            ):
                if is_over.is_set():
                    return False
                self._has_less.wait(1.0)
            self._waiting_bytes += size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        """Subtract bytes that were read."""
        with self._has_less:
            self._waiting_bytes -= size_bytes
            self._has_less.notify_all()


class EventQueue:
    """Events of all nodes, limited in size for each node. `clock` gives the seconds since the start of the run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Each with the size that it counts as.
        self._events: queue.SimpleQueue[tuple[Event, int]] = queue.SimpleQueue()
        self._rooms: dict[int, _Room] = {}
        self._rooms_lock = threading.Lock()
        self._is_over = threading.Event()

    def put(
        self, node_rank: int, what: protocol.Message | Launched, size_bytes: int = 0
    ) -> None:
        """Queue an event of a node, whose line had so many bytes. Blocks while too much of this node is unread.

        Never call it on the thread that calls `batch`: that would deadlock.
        """
        with self._rooms_lock:
            if node_rank not in self._rooms:
                self._rooms[node_rank] = _Room()
            room = self._rooms[node_rank]
        counted = max(_LEAST_BYTES, size_bytes)
        if room.take(counted, self._is_over):
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
        found: list[tuple[Event, int]] = []
        try:
            first = (
                self._events.get(timeout=timeout_s)
                if timeout_s > 0
                else self._events.get_nowait()
            )
            found.append(first)
            time.sleep(_GATHER_S * len(self._rooms))
            while len(found) < 100_000:
                found.append(self._events.get_nowait())
        except queue.Empty:
            pass
        for event, counted in found:
            if counted:
                self._rooms[event.node_rank].give_back(counted)
        return [event for event, _ in found]

    def close(self) -> None:
        """Release all threads that wait for space."""
        self._is_over.set()
