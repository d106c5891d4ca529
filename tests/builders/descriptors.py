"""Files that a process of its own would close by its end."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def closed_at_the_end() -> Iterator[None]:
    """Close the descriptors that the block leaves open: an agent keeps its files until its process ends.

    Beyond 1,024 of them `select` fails in whatever test comes later.
    """
    before = _open_now()
    # What the block makes stays young: garbage that closes itself is found without a look at all that a worker has loaded.
    gc.disable()
    yield
    gc.collect(0)
    gc.enable()
    for number in _open_now() - before:
        os.close(number)


def _open_now() -> set[int]:
    """Return all descriptors, but for the one that lists them."""
    names = os.listdir("/proc/self/fd")
    return {int(name) for name in names if Path(f"/proc/self/fd/{name}").exists()}
