"""Enforces the limits of message fields (distmagic/remote/wire/bounds.py) on everything that hosts
send. Pure.

All messages from hosts are decoded by `DECODER`. It removes terminal control sequences from texts.
A correct host keeps the limits by itself, so only messages of a faulty host are changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Annotated

from distmagic import sanitize
from distmagic.errors import ProtocolError
from distmagic.remote.frozen import frozen
from distmagic.remote.wire import codec
from distmagic.remote.wire.bounds import Word
from distmagic.remote.wire.codec import Limit, Numbers, Wrong

_MOST = 1e18


def _text(clean: Callable[[str], str]) -> Callable[[int], Limit]:
    """Return a factory of limits: its limit cuts a text to a length, and applies `clean` to an
    unprintable one.
    """

    def limit_of(most: int) -> Limit:
        def limit(value: str) -> str:
            if len(value) <= most and value.isprintable():
                return value
            return clean(value[:most])

        return limit

    return limit_of


def _amount(low: float, high: float) -> Limit:
    def limit(value: float) -> float:
        return max(low, 0.0) if math.isnan(value) else min(max(value, low), high)

    return limit


def _amount_or_none(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return min(max(value, -_MOST), _MOST)


_seconds = _amount(-_MOST, _MOST)


def _size(value: int) -> int:
    if not 0 <= value < 1 << 63:
        raise Wrong("no size")
    return value


def _points(numbers: Numbers) -> Numbers:
    """Bring the seconds and steps of points into their range; a value may be any number."""
    found = list(numbers)
    for place in range(0, len(found), 3):
        if not abs(found[place]) <= _MOST:  # as NaN is not
            found[place] = _seconds(found[place])
        if not abs(found[place + 1]) <= _MOST:
            step = _amount_or_none(found[place + 1])
            found[place + 1] = math.nan if step is None else step
    return Numbers(found)


LIMITS: dict[str, Callable[..., Limit]] = {
    "line": _text(sanitize.line),
    "lines": _text(sanitize.lines),
    "log": _text(sanitize.log),
    "amount": _amount,
    "amount_or_none": lambda: _amount_or_none,
    "points": lambda: _points,
    "size": lambda: _size,
}


@frozen
class FirstReply:
    """The first reply of a host, before distmagic's code runs on it; see
    `distmagic.remote.contact.boot`.
    """

    python: tuple[int, ...] = ()  # its Python version
    home: Annotated[str, "line", 500] = ""
    have: bool = False  # whether the bundle is on the host
    error: Annotated[str, "lines", 500] = ""  # why the host can't write a file
    executable: Annotated[str, "line", 500] | None = None
    system: Word = ""


DECODER = codec.Decoder(LIMITS)


def first_reply(text: bytes, host: str) -> FirstReply:
    """Return the parsed first reply of a host. Raises `ProtocolError`."""
    try:
        return DECODER.from_plain(FirstReply, json.loads(text))
    except (ValueError, RecursionError):  # `BadLine` is a ValueError, too
        raise ProtocolError(
            f"{host} sent {text[:80]!r} instead of its first answer."
        ) from None
