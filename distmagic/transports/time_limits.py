"""Timers: one thread of this process watches all time limits.

With a thread for each limit, a start of 512 hosts would need some two thousand, mostly for nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from distmagic.remote.system import threads

_LOOK_S = 0.1  # pause between two checks of all limits: the max delay of a call
_Limit = TypeVar("_Limit", bound="TimeLimit")


class TimeLimit:
    """Calls `act` once, on another thread, after so many seconds, unless it is called off before.

    As a context manager, the end of the block calls it off. `is_over`: the time has expired. Raises
    `RuntimeError` while Python exits, when no thread can start.
    """

    def __init__(self, seconds: float, act: Callable[[], object]) -> None:
        self.is_over = False
        self.act = act
        self.begin(seconds)

    def begin(self, seconds: float) -> None:
        """Count from now on: at first, and again after `call_off`."""
        self.end_s = time.monotonic() + seconds
        _watcher.watch(self, self.end_s)

    def call_off(self) -> bool:
        """Cancel the call; return False if it has happened, or is happening."""
        return _watcher.due_s.pop(self, None) is not None

    def __enter__(self: _Limit) -> _Limit:  # noqa: PYI019 - Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.call_off()


class _Watcher:
    """All limits of a process, and when each is due: accessed in atomic steps, which need no
    lock.
    """

    def __init__(self) -> None:
        self.due_s: dict[TimeLimit, float] = {}
        # Reentrant: starting a thread may trigger garbage collection, and a finalizer may use a
        # limit.
        self._beginning = threading.RLock()
        self._has_begun = False
        self._has_some = threading.Event()

    def watch(self, limit: TimeLimit, due_s: float) -> None:
        self.due_s[limit] = due_s
        self._has_some.set()
        with self._beginning:
            if not self._has_begun:
                # Only after the start: if no thread is available now, the next limit tries again.
                threads.begin("limits", self._look_for_ever)
                self._has_begun = True

    def _look_for_ever(self) -> None:
        while self._has_some.wait():
            time.sleep(_LOOK_S)
            self._look()
            self._has_some.clear()
            if self.due_s:
                self._has_some.set()

    def _look(self) -> None:
        """Begin the calls that are due.

        Its own function: no variable keeps the last limit while the thread waits.
        """
        now_s = time.monotonic()
        for limit, due_s in self.due_s.copy().items():
            if due_s <= now_s and self.due_s.pop(limit, None) is not None:
                limit.is_over = True
                try:
                    threads.begin("limit", limit.act)
                except (RuntimeError, MemoryError):
                    # No thread can start. All other limits depend on this one.
                    with suppress(Exception):
                        limit.act()


_watcher = _Watcher()


def _forget() -> None:
    """Reset in a forked child, which has neither its parent's threads nor its locks."""
    global _watcher  # noqa: PLW0603 - one for each process
    _watcher = _Watcher()


os.register_at_fork(after_in_child=_forget)
