"""Keeps the garbage collector from traversing the same objects again and again: loaded modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Run the block without the collector, and freeze all objects at its end: the collector never traverses them again.

    With torch loaded one collection takes a tenth of a second, and Python makes several when it exits: half a second.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
