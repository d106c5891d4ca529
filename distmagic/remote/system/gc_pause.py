"""Loading a thousand modules without the garbage collector, which would look at all of them again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Do the block without the collector, and keep what it made out of the collector's sight for good.

    With torch loaded one look takes a tenth of a second, and Python takes several when it ends: half a second.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
