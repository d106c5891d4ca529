"""Shows what happens before a run can be shown: while the cell's own lines run, nothing else is
visible.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from distmagic.remote.system import threads
from distmagic.render.screen import Screen

FIRST_S = 0.05  # shorter waits are not shown
_EVERY_S = 1.0


@contextmanager
def announcing(
    screen: Screen, what: Callable[[], str], in_vain: str, *, at_once: bool = False
) -> Iterator[None]:
    """Show on `screen` what happens during the block, and for how long, after 0.05 s or `at_once`;
    if the block raises, show `in_vain` instead.

    `what` is called on another thread from time to time.
    """
    is_over = threading.Event()
    has_said: list[str] = []

    def announce() -> None:
        pause_s, began_s = 0.0 if at_once else FIRST_S, time.monotonic()
        while not is_over.wait(pause_s):
            pause_s = _EVERY_S
            text = what()
            if has_said and text != has_said[-1]:
                began_s = time.monotonic()
            has_said.append(text)
            past_s = time.monotonic() - began_s
            screen.announce(f"{text}, {past_s:.0f} s" if past_s >= 1 else text)

    # In this thread's context, by which a kernel finds the cell of an output.
    context = contextvars.copy_context()
    thread = threads.begin("announce", context.run, announce)
    has_ended_well = False
    try:
        yield
        has_ended_well = True
    finally:
        is_over.set()
        thread.join()
        if has_said and not has_ended_well:
            screen.announce(in_vain)
