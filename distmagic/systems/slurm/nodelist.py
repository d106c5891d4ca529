"""Slurm's short form of names of nodes, written out: `a[1-3,07]b` is a1b, a2b, a3b, a07b. Pure."""

from __future__ import annotations

import re

_MOST_NAMES = 100_000
_PART = re.compile(r"\[(?P<ranges>[^\[\]]*)\]|(?P<text>[^\[\],]+)")
_RANGE = re.compile(r"(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?")


def expand(text: str) -> tuple[str, ...]:
    """Return the names in the order in which `scontrol show hostnames` gives them. Raises ValueError.

    A number keeps its zeros: `[08-10]` is 08, 09, 10. Several brackets give every combination, the last one fastest.
    """
    names: list[str] = []
    at = 0
    while at < len(text):
        found, at = _one(text, at)
        names += found
        if len(names) > _MOST_NAMES:
            raise ValueError(f"{text[:80]!r} are more than {_MOST_NAMES:,} nodes")
        if at < len(text):
            at += 1  # the comma
            if at == len(text):
                raise ValueError(f"{text[:80]!r} ends with a comma")
    return tuple(names)


def _one(text: str, at: int) -> tuple[list[str], int]:
    """Return the names of the part that begins at `at`, and where it ends: at a comma or at the end."""
    names = [""]
    begin = at
    while at < len(text) and text[at] != ",":
        part = _PART.match(text, at)
        if part is None:
            raise ValueError(
                f"{text[:80]!r} is not a list of nodes: a bracket at {at} has no other"
            )
        endings = [part["text"]] if part["text"] else _numbers(part["ranges"])
        if len(names) * len(endings) > _MOST_NAMES:
            raise ValueError(f"{text[:80]!r} are more than {_MOST_NAMES:,} nodes")
        names = [name + ending for name in names for ending in endings]
        at = part.end()
    if at == begin:
        raise ValueError(
            f"{text[:80]!r} is not a list of nodes: nothing before the comma at {at}"
        )
    return names, at


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for one in ranges.split(","):
        found = _RANGE.fullmatch(one)
        if found is None:
            raise ValueError(f"[{ranges[:80]}] is not a range of numbers")
        first, last = int(found["first"]), int(found["last"] or found["first"])
        if last - first > _MOST_NAMES or last < first:
            raise ValueError(f"[{ranges[:80]}] is not a range of numbers")
        width = len(found["first"])
        numbers += [str(number).zfill(width) for number in range(first, last + 1)]
    return numbers
