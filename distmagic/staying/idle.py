"""The time that ranks that stay spend without a cell. When it is up they end, and no cell begins on them any more."""

from __future__ import annotations

import threading
from collections.abc import Callable


class IdleTime:
    """The time of one session. `limit_s` is how long it may last, None: as long as the kernel.

    It stands still while a cell runs, and before the first one. `runs_out` is called on the thread of the session's loop,
    all else on that of a cell.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float]) -> None:
        self.limit_s = limit_s
        self.is_up = False
        self._clock = clock
        self._lock = threading.Lock()
        self._since_s: float | None = None

    def begin_cell(self) -> bool:
        """Let a cell begin; return whether it may."""
        with self._lock:
            self._since_s = None
            return not self.is_up

    def end_cell(self) -> None:
        """Count from now on."""
        self._since_s = self._clock()

    @property
    def left_s(self) -> float | None:
        """The seconds until it is up, None where it does not count."""
        since_s = self._since_s
        if self.limit_s is None or since_s is None:
            return None
        return max(0.0, since_s + self.limit_s - self._clock())

    def runs_out(self) -> bool:
        """Return once that it is up now."""
        with self._lock:
            is_over = not self.is_up and self.left_s == 0.0
            self.is_up = self.is_up or is_over
            return is_over
