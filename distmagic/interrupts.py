"""Interrupts (Ctrl-C, the notebook's stop button), counted or held where an exception in the middle would lose a host."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
