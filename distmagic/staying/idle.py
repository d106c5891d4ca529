"""Counts how long ranks that stay are unused: without a cell, and without work on their GPUs.

When that is too long, the ranks end and no cell can begin.

A notice comes before: five minutes before the end, or after half of a shorter time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

_NOTICE_S = 300.0


class IdleTime:
    """The idle time of one session, and its limit. `is_up`: the limit was reached.

    It does not count while a cell runs, nor before the first cell. `note_gpu_use`, `notice_is_due`
    and `runs_out` are called on the thread of the session's loop, everything else on the thread of
    a cell.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self.limit_s = limit_s
        self.is_up = False
        self._clock = clock
        self._lock = threading.Lock()
        self._since_s = math.inf
        self._has_noticed = False

    def begin_cell(self) -> bool:
        """Stop counting; return whether a cell can still begin."""
        with self._lock:
            self._since_s = math.inf
            return not self.is_up

    def end_cell(self) -> None:
        """Count from now on."""
        with self._lock:
            self._has_noticed = False
            self._since_s = self._clock()

    def note_gpu_use(self) -> None:
        """Count from now on, unless a cell runs: a GPU works, as for a thread that a cell has
        left.
        """
        with self._lock:
            self._has_noticed = False
            self._since_s = max(self._since_s, self._clock())

    @property
    def left_s(self) -> float:
        """The seconds until the limit, infinite while nothing is counted."""
        return max(0.0, self._since_s + self.limit_s - self._clock())

    def notice_is_due(self) -> bool:
        """Return True once in each idle time, shortly before the limit."""
        with self._lock:
            is_near = 0.0 < self.left_s <= min(_NOTICE_S, self.limit_s / 2)
            is_due = is_near and not self._has_noticed
            self._has_noticed = self._has_noticed or is_near
            return is_due

    def runs_out(self) -> bool:
        """Return True once, when the limit is reached."""
        with self._lock:
            is_over = not self.is_up and self.left_s == 0.0
            self.is_up = self.is_up or is_over
            return is_over
