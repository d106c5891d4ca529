"""Shortens texts of any objects so that they fit into a line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

# A line instead of the middle of a text.
LEFT_OUT = re.compile(r"^\.\.\. [\d,]+ characters left out \.\.\.$", re.MULTILINE)


def text_of(value: object) -> str:
    """Return `str(value)`, or the error that it raised."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - the user's own __str__
        return f"<its str() raised {type(error).__name__}>"


def ranges(ranks: Iterable[int]) -> list[str]:
    """Return ranks in ascending order, as ranges: `0-3` and `8`."""
    parts: list[list[int]] = []  # the first and the last rank of each
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ["-".join(map(str, part)) for part in parts]


def clipped(text: str, max_bytes: int) -> str:
    """Return a text of at most `max_bytes` in JSON; the middle is left out, as the ends of a
    traceback matter most.
    """
    if len(json.dumps(text)) <= max_bytes:
        return text
    kept = max_bytes
    while True:
        kept //= 2
        short = f"{text[:kept]}\n... {len(text) - 2 * kept:,} characters left out ...\n{text[-kept:]}"
        if len(json.dumps(short)) <= max_bytes:
            return short
