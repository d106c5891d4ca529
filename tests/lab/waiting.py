"""Wait for a condition, with a deadline: what tests use in place of sleeping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Seconds. No wait for what will come ends before: on a busy machine anything takes long, and only what hangs takes so long.
HANG_S = 120.0


def wait_until(
    condition: Callable[[], T], what: str, timeout_s: float = HANG_S, *, every_s: float = 0.01
) -> T:  # fmt: skip
    """Return the condition's first true value, which is looked for `every_s`: less often where a look is a process.

    A pause is four times as long as the look before it, or longer: the processor is for what is waited for. Raises
    AssertionError, naming `what`, after `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    pause = threading.Event()
    begun = time.monotonic()
    while not (value := condition()):
        now = time.monotonic()
        if now > end:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what}")
        pause.wait(max(every_s, 4 * (now - begun)))
        begun = time.monotonic()
    return value
