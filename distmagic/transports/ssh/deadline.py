"""The time limit of one connection, not counting the time in which the user types or another thread
connects.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from distmagic.transports.time_limits import TimeLimit


class Deadline:
    """Calls `on_expiry` once, on another thread, when `seconds` have passed; a context manager for
    one thread.

    `expired`: an error came from that. `on_expiry` must end every blocking call.
    """

    def __init__(self, seconds: float, on_expiry: Callable[[], None]) -> None:
        self.seconds = seconds
        self.expired = False
        self._on_expiry = on_expiry
        self._left = seconds
        self._since: float | None = None  # None before it, after it and in pauses
        self._limit: TimeLimit | None = None
        self._changing = threading.Lock()

    def __enter__(self) -> Deadline:  # noqa: PYI034 - Self needs Python 3.11
        self._go_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._halt()

    def remaining(self) -> float:
        """Return the seconds left, never less than 0."""
        spent = 0.0 if self._since is None else time.monotonic() - self._since
        return max(self._left - spent, 0.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time spent inside the block."""
        if self._since is None:
            yield
            return
        self._halt()
        try:
            yield
        finally:
            self._go_on()

    def _go_on(self) -> None:
        self._since = time.monotonic()
        self._limit = TimeLimit(self._left, self._expire)

    def _halt(self) -> None:
        if self._limit is not None:
            self._limit.call_off()
        with self._changing:
            self._left = self.remaining()
            self._since = None

    def _expire(self) -> None:
        with self._changing:
            if self._since is None:
                return
            self.expired = True
        self._on_expiry()
