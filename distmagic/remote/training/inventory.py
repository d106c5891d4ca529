"""What a rank has under its names, in words: types, shapes, devices, bytes, and the memory of its
GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from distmagic.remote.frozen import frozen

_LONGEST = 80  # characters of a text


@frozen
class Inventory:
    """What one rank has: for each name a text and its bytes in tensors.

    `gpu` are the bytes that torch has allocated and reserved, and the total of the current GPU;
    None without one.
    """

    names: tuple[tuple[str, str, int], ...]
    gpu: tuple[int, int, int] | None


def of(values: Mapping[str, object], names: Iterable[str]) -> Inventory:
    """Return the inventory of these names of a namespace.

    It calls no code of their classes but what torch's has.
    """
    torch = sys.modules.get("torch")
    found = []
    for name in names:
        if name in values:
            text, size = described(values[name])
            found.append((name, text[:_LONGEST], size))
    gpu = None
    # Not before the rank uses its GPU: a first call would take its memory.
    if torch is not None and torch.cuda.is_initialized():
        _, total = torch.cuda.mem_get_info()
        gpu = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total
    return Inventory(names=tuple(found), gpu=gpu)


def described(value: object) -> tuple[str, int]:
    """Return a text about a value, and its bytes in tensors.

    It calls no code of its class but what torch's has.
    """
    torch: Any = sys.modules.get("torch")
    # A lazy module has no sizes yet, and a class of the user's own may raise anything.
    with contextlib.suppress(Exception):
        if torch is not None:
            return _described(value, torch)
    return type(value).__name__, 0


def _described(value: Any, torch: Any) -> tuple[str, int]:
    kind = type(value).__name__
    if issubclass(type(value), torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        text = f"{kind} {list(value.shape)} {dtype} on {value.device}"
        return text, _bytes_of([value])
    if issubclass(type(value), torch.nn.Module):
        parts = [*value.parameters(), *value.buffers()]
        count = sum(part.numel() for part in value.parameters())
        devices = ", ".join(sorted({str(part.device) for part in parts})) or "no device"
        return (
            f"{kind}, {count:,} parameter{'s' * (count != 1)} on {devices}",
            _bytes_of(parts),
        )
    if issubclass(type(value), torch.optim.Optimizer):
        tensors = [
            one
            for state in value.state.values()
            for one in state.values()
            if isinstance(one, torch.Tensor)
        ]
        return kind, _bytes_of(tensors)
    return kind, 0


def _bytes_of(tensors: Iterable[Any]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)
