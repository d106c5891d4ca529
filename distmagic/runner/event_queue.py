"""The queue between the threads of a run and its loop, which has the run's own thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from distmagic.remote.wire import protocol
from distmagic.state.events import Event, Launched

# Of one node that may wait to be folded; a host that sends more is not read meanwhile.
_AHEAD_BYTES = 1 << 20
_LEAST_BYTES = (
    4096  # that an event counts as, however short it is: so 256 of them wait at most
)
_GATHER_S = 0.0003  # a node: to fold one event costs as much as to fold what all nodes send meanwhile


class _Room:
    """How many bytes of one node wait."""

    def __init__(self) -> None:
        self._waiting_bytes = 0
        self._has_less = threading.Condition()

    def take(self, size_bytes: int, is_over: threading.Event) -> bool:
        """Wait until so much more may wait, and count it; return False where nobody reads any more."""
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
        """Note that so much has been read."""
        with self._has_less:
            self._waiting_bytes -= size_bytes
            self._has_less.notify_all()


class EventQueue:
    """Events of all nodes, bounded for each. `clock` gives the seconds since the run began."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # With what it counts in its room.
        self._events: queue.SimpleQueue[tuple[Event, int]] = queue.SimpleQueue()
        self._rooms: dict[int, _Room] = {}
        self._rooms_lock = threading.Lock()
        self._is_over = threading.Event()

    def put(
        self, node_rank: int, what: protocol.Message | Launched, size_bytes: int = 0
    ) -> None:
        """Queue an event of a node, which came in a line of so many bytes. Blocks while much of this node is unread.

        So never call it on the thread that calls `batch`: it would deadlock.
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
        """Queue what an act ended with, or what happened on the notebook's side. Never blocks."""
        event = Event(node_rank=node_rank, at_s=self._clock(), what=what)
        self._events.put((event, 0))

    def wake(self) -> None:
        """Let `batch` return now."""
        self.tell(None)

    def batch(self, timeout_s: float) -> list[Event]:
        """Return the events that have come, after at most `timeout_s`; [] for none."""
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
        """Let no thread wait for room any more."""
        self._is_over.set()
