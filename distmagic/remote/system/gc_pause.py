"""Keeps the garbage collector from scanning the same objects again and again: loaded modules, a
notebook's own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Run the block without the collector, and freeze all objects at its end: the collector never
    scans them again.

    With torch loaded one collection takes 0.1 s, and Python runs several when it exits: 0.5 s.
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
    """Exclude existing objects from all collections in the block, unless other code has already
    frozen some.

    A thousand ranks at 10 Hz make the collector scan all objects several times a second: a third of
    the whole cost. Do not use it for a short run: each freeze restarts Python's count for the next
    full collection. A notebook that freezes in every cell would never have one.
    """
    if gc.get_freeze_count() > 0:
        yield
        return
    gc.collect()  # later, garbage would not be found
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
