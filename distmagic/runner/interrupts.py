"""Interrupts (Ctrl-C, the stop button): counted, or delayed where an exception could lose a
host.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Signals in quick succession count as one: timeout(1) signals its own process, and then its process
# group.
_ONCE_S = 1.0


class Interrupts:
    """Counts interrupts, so that the run loop handles them between two steps, when no event can be
    lost.

    While a question waits for the user's answer (`is_asking`), an interrupt also raises
    KeyboardInterrupt at once.
    """

    count = 0
    is_asking = False
    was_sigterm = False  # whether the last one was SIGTERM

    def __call__(self, number: int = signal.SIGINT, *_: object) -> None:
        """Count an interrupt; used as a signal handler."""
        self.count += 1
        self.was_sigterm = number == signal.SIGTERM
        if self.is_asking:
            raise KeyboardInterrupt

    def take(self) -> bool:
        """Return whether there is an unhandled interrupt, and mark it as handled."""
        if self.count == 0:
            return False
        self.count -= 1
        return True

    def ask(self, serve: Callable[[float], None]) -> None:
        """Call `serve` to answer a question, without waiting for one; an interrupt cancels the
        question, and is counted.
        """
        self.is_asking = True
        try:
            serve(0.0)
        except KeyboardInterrupt:
            return
        finally:
            self.is_asking = False


@contextmanager
def noted() -> Iterator[Interrupts]:
    """Count interrupts inside the block, for its code to handle when it can."""
    found = Interrupts()
    with sent_to(found):
        yield found


@contextmanager
def sent_to(handler: Callable[..., object]) -> Iterator[None]:
    """Inside the block, interrupts call `handler` instead of raising KeyboardInterrupt anywhere in
    it.

    On any thread except the main one nothing changes: Python delivers signals only to the main
    thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def from_signal(number: int) -> Iterator[None]:
    """Inside the block, treat another signal as an interrupt, unless it is ignored.

    On the main thread only.
    """
    last_s = -math.inf

    def interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal last_s
        before_s, last_s = last_s, time.monotonic()
        if last_s - before_s < _ONCE_S:
            return
        handler = signal.getsignal(signal.SIGINT)
        # A shell makes its background processes ignore interrupts.
        if not callable(handler):
            raise KeyboardInterrupt
        handler(number, frame)

    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        yield
        return
    signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)
