"""What is to happen when a time is up: one thread of this process watches all limits.

With a thread for each limit, a start of 512 hosts would begin some two thousand of them, to no end but to be called off.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial


class TimeLimits:
    """Acts that happen when their time has come, unless they are called off before. Safe to use from threads.

    Each act has a thread of its own: one that hangs holds up no other, as long as threads can be started. The thread that
    waits for their times is there only while there are any.
    """

    def __init__(self) -> None:
        # An interrupt can't leave this one held. A condition's own way in and out is Python, in which it could come.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._numbers = itertools.count()
        self._acts: dict[int, Callable[[], object]] = {}
        # When each of them is due, the earliest first; also those that were called off since.
        self._due: list[tuple[float, int]] = []
        self._is_watched = False

    def after(self, seconds: float, act: Callable[[], object]) -> int:
        """Have an act happen after so many seconds; return its number. Raises `RuntimeError` when Python ends."""
        due_s = time.monotonic() + seconds
        with self._lock:
            if not self._is_watched:
                # It waits for the lock before it looks at anything.
                _begin(self._watch)
                self._is_watched = True
            number = next(self._numbers)
            heapq.heappush(self._due, (due_s, number))
            self._acts[number] = act
            if self._due[0] == (due_s, number):
                self._changed.notify()
        return number

    def call_off(self, number: int) -> None:
        """Let an act not happen. One that has happened, or happens just now, is left alone."""
        self._take(number)

    def _take(self, number: int) -> Callable[[], object] | None:
        """Return an act that nobody has taken yet, which is then over; else None."""
        with self._lock:
            act = self._acts.pop(number, None)
            if not self._acts:
                self._changed.notify()
            return act

    def _watch(self) -> None:
        while True:
            with self._lock:
                number = self._next()
                if number is None:
                    self._due = []
                    self._is_watched = False
                    return
            try:
                _begin(partial(self._happen, number))
            except (RuntimeError, MemoryError):
                # No thread can be started: Python ends, or the machine has no room for one.
                with suppress(Exception):  # all other limits depend on this thread
                    self._happen(number)

    def _next(self) -> int | None:
        """Wait for the next act that is due, and return its number; None as soon as there is none.

        The lock is held, except while it waits.
        """
        while self._acts and self._due:
            due_s, number = self._due[0]
            left_s = due_s - time.monotonic()
            if number in self._acts and left_s > 0:
                self._changed.wait(left_s)
                continue
            heapq.heappop(self._due)
            if number in self._acts:
                return number
        return None

    def _happen(self, number: int) -> None:
        # Until the last moment it may be called off.
        act = self._take(number)
        if act is not None:
            act()


def _begin(act: Callable[[], object]) -> None:
    threading.Thread(target=act, name="distmagic-limits", daemon=True).start()


_of_processes: dict[int, TimeLimits] = {}


def time_limits() -> TimeLimits:
    """Return those of this process: a process that was forked has neither its parent's threads nor its locks."""
    pid = os.getpid()
    known = _of_processes.get(pid)
    if known is None:
        known = _of_processes.setdefault(pid, TimeLimits())
    return known
