"""What is to happen when a time is up: one thread of this process watches all limits.

With a thread for each limit, a start of 512 hosts would begin some two thousand of them, to no end but to be called off.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from distmagic.remote.system import threads

# Between two looks at all limits: by so much an act may be late. Nobody has to wake the thread that looks, so no
# interrupt, wherever it comes, can make it miss an act.
_LOOK_S = 0.1


class TimeLimits:
    """Acts that happen when their time has come, unless they are called off before. Safe to use from threads.

    Each act has a thread of its own: one that hangs holds up no other. The thread that looks is there only while there
    are any.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # When each is due, and the act. Read, written and copied in single steps, which need no lock.
        self._acts: dict[int, tuple[float, Callable[[], object]]] = {}
        # Again in the same thread: where a thread is begun, memory may be collected, and a finalizer may ask for a limit.
        self._watching = threading.RLock()
        self._is_watched = False

    def after(self, seconds: float, act: Callable[[], object]) -> int:
        """Have an act happen after so many seconds; return its number. Raises `RuntimeError` when Python ends."""
        number = next(self._numbers)
        self._acts[number] = (time.monotonic() + seconds, act)
        try:
            with self._watching:
                if not self._is_watched:
                    threads.begin("limits", self._watch)
                    self._is_watched = True
        except BaseException:
            self.call_off(number)
            raise
        return number

    def call_off(self, number: int) -> None:
        """Let an act not happen. One that has happened, or happens just now, is left alone."""
        self._acts.pop(number, None)

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            # All other limits depend on this thread.
            with suppress(Exception):
                self._look()
                if not self._has_acts():
                    return

    def _has_acts(self) -> bool:
        """Whether there are any; if not, the next one begins a thread anew."""
        with self._watching:
            self._is_watched = bool(self._acts)
            return self._is_watched

    def _look(self) -> None:
        now_s = time.monotonic()
        for number, (due_s, act) in self._acts.copy().items():
            if due_s <= now_s and self._acts.pop(number, None) is not None:
                try:
                    threads.begin("limits", act)
                except (RuntimeError, MemoryError):
                    # No thread can be started: Python ends, or the machine has no room for one.
                    with suppress(Exception):
                        act()


_of_processes: dict[int, TimeLimits] = {}
# A later child may be given the pid of an ancestor.
os.register_at_fork(after_in_child=_of_processes.clear)


def time_limits() -> TimeLimits:
    """Return those of this process: a process that was forked has neither its parent's threads nor its locks."""
    pid = os.getpid()
    known = _of_processes.get(pid)
    if known is None:
        known = _of_processes.setdefault(pid, TimeLimits())
    return known
