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


class Heap:
    """The notebook's own objects, which the garbage collector need not look at while a run goes on."""

    def __init__(self) -> None:
        self._was_asked = False
        self._is_frozen = False

    def freeze(self) -> None:
        """Leave out of all collections what lives now. Garbage goes before: it would not be found any more.

        Only the first call does so, and only where nothing is frozen: else it is somebody else's decision.
        """
        if self._was_asked:
            return
        self._was_asked = True
        # Python counts one frozen object after the other: short runs don't ask.
        if gc.get_freeze_count() == 0:
            self._is_frozen = True
            gc.collect()
            gc.freeze()

    def unfreeze(self) -> None:
        """Have all objects collected again."""
        if self._is_frozen:
            gc.unfreeze()


@contextmanager
def heap_left_alone() -> Iterator[Heap]:
    """Yield the heap, which a long run may freeze. Afterwards it is as before.

    A thousand ranks at 10 Hz make the collector look through all that lives several times a second: a third of the
    whole cost. A short run must leave it alone: each freeze begins Python's count for the next full collection anew,
    and a notebook that freezes in every cell would never have one.
    """
    heap = Heap()
    try:
        yield heap
    finally:
        heap.unfreeze()
