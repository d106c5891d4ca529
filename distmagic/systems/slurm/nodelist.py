"""Expands Slurm's short form of node names: `a[1-3,07]b` is a1b, a2b, a3b, a07b. Pure."""

from __future__ import annotations

import itertools
import math
import re

_MOST_NAMES = 100_000
_RANGE = r"\d{1,9}(?:-\d{1,9})?"
_NUMBERS = rf"{_RANGE}(?:,{_RANGE})*"
_PART = re.compile(rf"\[({_NUMBERS})\]|([^\[\],]+)")
# One character in each step: otherwise every length would be tried if the text is no list.
_NAME = re.compile(rf"(?:\[{_NUMBERS}\]|[^\[\],])+")
_LIST = re.compile(f"{_NAME.pattern}(?:,{_NAME.pattern})*")


def expand(text: str) -> tuple[str, ...]:
    """Return the names in the order of `scontrol show hostnames`. Raises ValueError.

    A number keeps its zeros: `[08-10]` is 08, 09, 10. Several brackets give every combination; the
    last one varies fastest.
    """
    if text and not _LIST.fullmatch(text):
        raise ValueError(f"{text[:80]!r} is not a list of nodes")
    names = []
    for name in _NAME.finditer(text):
        parts = [
            _numbers(part[1]) if part[1] else [part[2]]
            for part in _PART.finditer(name[0])
        ]
        if math.prod(len(part) for part in parts) > _MOST_NAMES:
            raise ValueError(f"{text[:80]!r} are more than {_MOST_NAMES:,} nodes")
        names += ["".join(combination) for combination in itertools.product(*parts)]
    return tuple(names)


def _numbers(ranges: str) -> list[str]:
    numbers = []
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        count = int(last or first) - int(first) + 1
        if not 0 < count <= _MOST_NAMES:
            raise ValueError(f"[{ranges[:80]}] is not a range of numbers")
        for number in range(int(first), int(first) + count):
            numbers.append(str(number).zfill(len(first)))
    return numbers
