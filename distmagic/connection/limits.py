"""What hosts say, kept within the bounds that stand at the fields of messages (distmagic/remote/wire/bounds.py). Pure.

All that comes from hosts is read through `DECODER`. Nothing in a text is obeyed by a terminal. A host of ours stays within
all bounds by itself: what is changed here was sent by one that is broken.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from distmagic import sanitize
from distmagic.errors import ProtocolError
from distmagic.remote.wire import codec
from distmagic.remote.wire.bounds import Word
from distmagic.remote.wire.codec import Limit, Wrong


def _text(clean: Callable[[str], str]) -> Callable[[int], Limit]:
    """Return what makes a limit of a length: a text is cut to it, and `clean` where it can't be printed as it is."""

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
    return min(max(value, -1e18), 1e18)


def _size(value: int) -> int:
    if not 0 <= value < 1 << 63:
        raise Wrong("no size")
    return value


LIMITS: dict[str, Callable[..., Limit]] = {
    "line": _text(sanitize.line),
    "lines": _text(sanitize.lines),
    "log": _text(sanitize.log),
    "amount": _amount,
    "amount_or_none": lambda: _amount_or_none,
    "size": lambda: _size,
}


@dataclass(frozen=True, kw_only=True)
class FirstReply:
    """What a host says of itself before our own half runs there; see `distmagic.remote.contact.boot`.

    `python` is the version of its Python. `have`: the bundle is there. `error`: why nothing can be written there.
    """

    python: tuple[int, ...] = ()
    home: Annotated[str, "line", 500] = ""
    have: bool = False
    error: Annotated[str, "lines", 500] = ""
    executable: Annotated[str, "line", 500] | None = None
    system: Word = ""


DECODER = codec.Decoder(LIMITS)


def first_reply(text: bytes, host: str) -> FirstReply:
    """Return what a host says of itself before our own half runs there. Raises `ProtocolError`."""
    try:
        return DECODER.from_plain(FirstReply, json.loads(text))
    except (ValueError, RecursionError):  # `BadLine` is a ValueError, too
        raise ProtocolError(
            f"{host} sent {text[:80]!r} instead of its first answer."
        ) from None
