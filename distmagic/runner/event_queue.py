"""Where the threads that listen to the nodes leave their events, and the main thread finds them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from distmagic.remote.wire import protocol
from distmagic.state.events import Event, Launched

_AHEAD = 256  # events of one node that may wait to be folded; a host that says more is not read meanwhile
_GATHER_S = 0.0003  # a node: to fold one event costs as much as to fold what all nodes say meanwhile


class EventQueue:
    """Events of all nodes, bounded for each. `clock` tells the seconds since the run began."""

    def __init__(self, nodes: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._room = [threading.BoundedSemaphore(_AHEAD) for _ in range(nodes)]
        self._over = threading.Event()

    def add_node(self) -> None:
        """Make room for the events of one more node."""
        self._room.append(threading.BoundedSemaphore(_AHEAD))

    def put(self, node_rank: int, what: protocol.Message | Launched) -> None:
        """Leave an event, when there is room for one more of this node. Not for the thread of `batch`."""
        while not self._room[node_rank].acquire(timeout=1.0):
            if self._over.is_set():
                return
        self._events.put(Event(node_rank=node_rank, at_s=self._clock(), what=what))

    def batch(self, timeout_s: float) -> list[Event]:
        """Return the events that have come, after at most `timeout_s`; [] for none."""
        found: list[Event] = []
        try:
            found.append(self._events.get(timeout=timeout_s))
            time.sleep(_GATHER_S * len(self._room))
            while len(found) < 100_000:
                found.append(self._events.get_nowait())
        except queue.Empty:
            pass
        for event in found:
            self._room[event.node_rank].release()
        return found

    def close(self) -> None:
        """Let nobody wait for room any more."""
        self._over.set()
