"""What ranks that stay have, as lines of text for `%distributed stay`. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from distmagic.payload.sizes import size_text
from distmagic.remote.training.inventory import Inventory
from distmagic.remote.wire.clipping import ranges

_LARGEST = 5  # names with a line of their own


def lines(inventories: Mapping[int, Inventory]) -> list[str]:
    """Return a line for each of the largest names, one for all other names, and one for each amount
    of GPU memory.

    A name is described as the first rank has it. Ranks with the same memory share a line.
    """
    owners: dict[str, list[int]] = {}
    described: dict[str, tuple[str, int]] = {}
    memory: dict[str, list[int]] = {}
    for rank, inventory in sorted(inventories.items()):
        for name, text, size in inventory.names:
            owners.setdefault(name, []).append(rank)
            described.setdefault(name, (text, size))
        if inventory.gpu is not None:
            allocated, reserved, total = map(size_text, inventory.gpu)
            words = f"{allocated} of {total} in tensors, {reserved} reserved by torch"
            memory.setdefault(words, []).append(rank)
    by_size = sorted(described, key=lambda name: (-described[name][1], name))
    found = []
    for name in by_size[:_LARGEST]:
        text, size = described[name]
        line = f"{name}: {text}{f', {size_text(size)}' if size else ''}"
        if len(owners[name]) < len(inventories):
            line += f" (rank {', '.join(ranges(owners[name]))} only)"
        found.append(line)
    if len(by_size) > _LARGEST:
        found.append(f"and {', '.join(sorted(by_size[_LARGEST:]))}")
    for words, ranks in memory.items():
        found.append(f"GPU memory, rank {', '.join(ranges(ranks))}: {words}")
    return found
