"""Interrupts (Ctrl-C, the notebook's stop button), counted or held where an exception in the middle would lose a host."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Signals that follow each other so soon are one: timeout(1) sends its own to a process, and again to its process group.
_ONCE_S = 1.0


class Interrupts:
    """Counts interrupts, so that the run loop handles them between two steps, when no event can be lost.

    While a question waits for the user's answer (`is_asking`), an interrupt also raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_asking = False
        self.was_sigterm = False  # the last one

    def __call__(self, number: int = signal.SIGINT, *_: object) -> None:
        """Note one: what a signal calls."""
        self.count += 1
        self.was_sigterm = number == signal.SIGTERM
        if self.is_asking:
            raise KeyboardInterrupt

    def take(self) -> bool:
        """Return whether there is one that was not handled, and count it as handled."""
        if self.count == 0:
            return False
        self.count -= 1
        return True

    def ask(self, serve: Callable[[float], None], timeout_s: float = 0.0) -> None:
        """Let `serve` answer a question, if one comes in time; an interrupt gives the question up, and is noted."""
        self.is_asking = True
        try:
            serve(timeout_s)
        except KeyboardInterrupt:
            return
        finally:
            self.is_asking = False


@contextmanager
def noted() -> Iterator[Interrupts]:
    """Have interrupts counted inside the block, for its code to handle when it can."""
    found = Interrupts()
    with sent_to(found):
        yield found


@contextmanager
def sent_to(handler: Callable[..., object]) -> Iterator[None]:
    """Have interrupts call `handler` inside the block, in place of raising KeyboardInterrupt anywhere in it.

    In another thread than the main one nothing changes: signals never arrive there.
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
    """Have another signal be an interrupt inside the block, unless it is ignored. In the main thread only."""
    last_s = -math.inf

    def interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal last_s
        before_s, last_s = last_s, time.monotonic()
        if last_s - before_s < _ONCE_S:
            return
        handler = signal.getsignal(signal.SIGINT)
        # A shell has interrupts ignored by what it starts in the background.
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
