"""Keeps the garbage collector from traversing the same objects again and again: loaded modules, a notebook's own."""

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


@contextmanager
def heap_left_alone() -> Iterator[None]:
    """Leave what lives now out of all collections of the block, unless somebody else has frozen something already.

    A thousand ranks at 10 Hz make the collector look through all that lives several times a second: a third of the
    whole cost. A short run must leave it alone: each freeze begins Python's count for the next full collection anew,
    and a notebook that freezes in every cell would never have one.
    """
    if gc.get_freeze_count() > 0:
        yield
        return
    gc.collect()  # garbage would not be found any more
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
