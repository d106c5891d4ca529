"""What is to happen when a time is up: each limit is a thread that waits, and mostly in vain."""

from __future__ import annotations

import threading
from collections.abc import Callable

from distmagic.remote.system import threads


class TimeLimit:
    """Has `act` happen once, on a thread of its own, after so many seconds; unless it is called off before.

    In a `with`, the end of the block calls it off. `is_over` tells whether the time is up. Raises `RuntimeError` when
    Python ends, which starts no thread any more.
    """

    def __init__(self, seconds: float, act: Callable[[], object]) -> None:
        self.is_over = False
        self._is_off = threading.Event()
        threads.begin("limit", self._wait, seconds, act)

    def _wait(self, seconds: float, act: Callable[[], object]) -> None:
        if not self._is_off.wait(seconds):
            self.is_over = True
            act()

    def call_off(self) -> None:
        """Let it not happen. What has happened, or happens just now, is left alone."""
        self._is_off.set()

    def __enter__(self) -> TimeLimit:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.call_off()
