"""Interrupts (Ctrl-C, the notebook's stop button), counted or held where an exception in the middle would lose a host."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupts:
    """Interrupts that have come and are still to be heeded, at a moment when nothing can get lost.

    Only while `is_asking`, a question of ours waits for its answer, one is raised at once as well.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_asking = False

    def __call__(self, *_: object) -> None:
        """Note one: what a signal calls."""
        self.count += 1
        if self.is_asking:
            raise KeyboardInterrupt

    def take(self) -> bool:
        """Return whether there is one to be heeded, and count it as heeded."""
        is_there = self.count > 0
        self.count -= is_there
        return is_there

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
    """Have interrupts noted inside the block: whoever acts in it heeds them when it can."""
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
