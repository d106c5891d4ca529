"""The time limit of one connection, not counting the time in which the user types or another thread
connects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from distmagic.transports.time_limits import TimeLimit


class Deadline(TimeLimit):
    """A time limit that can be paused.

    `is_over`: an error came from that. `act` must end every blocking call.
    """

    def __init__(self, seconds: float, act: Callable[[], object]) -> None:
        self.seconds = seconds
        self._left_s: float | None = None  # in a pause
        super().__init__(seconds, act)

    def call_off(self) -> bool:
        """Cancel the call; one that was not cancelled in time has come, or is coming."""
        in_time = super().call_off()
        self.is_over = self.is_over or not in_time
        return in_time

    def remaining(self) -> float:
        """Return the seconds left, never less than 0."""
        if self._left_s is not None:
            return self._left_s
        return max(self.end_s - time.monotonic(), 0.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time spent inside the block."""
        if self._left_s is not None:
            yield
            return
        self.call_off()
        self._left_s = self.remaining()
        try:
            yield
        finally:
            if not self.is_over:
                self.begin(self._left_s)
            self._left_s = None
