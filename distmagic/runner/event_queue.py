"""The queue between the threads of a run and its loop on the main thread."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from distmagic.remote.wire import protocol
from distmagic.state.events import Event, Launched

_AHEAD = 256  # events of one node that may wait to be folded; a host that sends more is not read meanwhile
_GATHER_S = 0.0003  # a node: to fold one event costs as much as to fold what all nodes send meanwhile


class EventQueue:
    """Events of all nodes, bounded for each. `clock` gives the seconds since the run began."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: queue.SimpleQueue[tuple[Event, bool]] = queue.SimpleQueue()
        self._room: defaultdict[int, threading.BoundedSemaphore] = defaultdict(
            lambda: threading.BoundedSemaphore(_AHEAD)
        )
        self._room_lock = threading.Lock()
        self._is_over = threading.Event()

    def put(self, node_rank: int, what: protocol.Message | Launched) -> None:
        """Queue an event of a node. Blocks while 256 events of this node are unread.

        So never call it on the thread that calls `batch`: it would deadlock.
        """
        with self._room_lock:
            room = self._room[node_rank]
        while not room.acquire(timeout=1.0):
            if self._is_over.is_set():
                return
        event = Event(node_rank=node_rank, at_s=self._clock(), what=what)
        self._events.put((event, True))

    def tell(self, what: Any, node_rank: int = 0) -> None:
        """Queue what an act ended with, or what happened on the notebook's side. Never blocks."""
        event = Event(node_rank=node_rank, at_s=self._clock(), what=what)
        self._events.put((event, False))

    def wake(self) -> None:
        """Let `batch` return now."""
        self.tell(None)

    def batch(self, timeout_s: float) -> list[Event]:
        """Return the events that have come, after at most `timeout_s`; [] for none."""
        found: list[tuple[Event, bool]] = []
        try:
            first = self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
            found.append(first)
            time.sleep(_GATHER_S * len(self._room))
            while len(found) < 100_000:
                found.append(self._events.get_nowait())
        except queue.Empty:
            pass
        for event, is_bounded in found:
            if is_bounded:
                self._room[event.node_rank].release()
        return [event for event, _ in found]

    def close(self) -> None:
        """Let no thread wait for room any more."""
        self._is_over.set()
