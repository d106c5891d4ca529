"""The time that one connection may take, not counting the time in which the user types or another connects."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from distmagic.remote.system import threads


class Deadline:
    """Calls `on_expiry` once, from a thread of its own, when `seconds` have passed; used in a `with`.

    `expired` tells afterwards whether an error came from that. Everything that blocks is ended by `on_expiry`.
    """

    def __init__(self, seconds: float, on_expiry: Callable[[], None]) -> None:
        self.seconds = seconds
        self.expired = False
        self._on_expiry = on_expiry
        self._changed = threading.Condition()
        self._left = seconds
        self._since: float | None = None
        self._paused = 0
        self._over = False

    def __enter__(self) -> Deadline:  # noqa: PYI034 - Self needs Python 3.11
        self._since = time.monotonic()
        threads.begin("deadline", self._watch)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def remaining(self) -> float:
        """Return the seconds left, never less than 0."""
        with self._changed:
            return self._remaining()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Don't count the time spent inside."""
        with self._changed:
            self._left = self._remaining()
            self._since = None
            self._paused += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._paused -= 1
                self._since = time.monotonic() if self._paused == 0 else None
                self._changed.notify_all()

    def _remaining(self) -> float:
        spent = 0.0 if self._since is None else time.monotonic() - self._since
        return max(self._left - spent, 0.0)

    def _watch(self) -> None:
        with self._changed:
            while not self._over and self._remaining() > 0:
                self._changed.wait(None if self._paused else self._remaining())
            if self._over:
                return
            self.expired = True
        self._on_expiry()
