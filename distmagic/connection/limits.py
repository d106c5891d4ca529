"""What hosts say, kept within the bounds that stand at the fields of messages (distmagic/remote/wire/bounds.py). Pure.

All that comes from hosts is read through `DECODER`. Nothing in a text is obeyed by a terminal. A host of ours stays within
all bounds by itself: what is changed here was sent by one that is broken, or hostile.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

from distmagic import sanitize
from distmagic.errors import ProtocolError
from distmagic.remote.wire import codec
from distmagic.remote.wire.bounds import Count, Word
from distmagic.remote.wire.codec import Limit, Wrong

_PERCENT_ENCODED = re.compile(r"[\w.~/%-]*", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but tabs and line breaks


# ---- kinds of limits


def whole(low: int, high: int) -> Limit:
    """Return a limit that takes a whole number to the nearest one from `low` to `high`."""

    def limit(value: int) -> int:
        if low <= value <= high:
            return value
        return low if value < low else high

    return limit


def exact_whole(low: int, high: int) -> Limit:
    """Return a limit that refuses a whole number unless it is from `low` to `high`."""

    def limit(value: int) -> int:
        if not low <= value <= high:
            raise Wrong(f"{value:,} is not from {low:,} to {high:,}")
        return value

    return limit


def number(low: float, high: float, *, is_optional: bool) -> Limit:
    """Return a limit that takes a number to the nearest one from `low` to `high`, and NaN to the one nearest to 0.

    An amount that may be unknown, because it is optional, is so where it is NaN or infinite.
    """
    otherwise = None if is_optional else max(low, 0.0)

    def limit(value: float) -> float | None:
        if low <= value <= high:
            return value
        if math.isnan(value) or (otherwise is None and math.isinf(value)):
            return otherwise
        return low if value < low else high

    return limit


def _text(clean: Callable[[str], str], most: int) -> Limit:
    """Return a limit for a text of at most so many characters, of which `clean` leaves what a terminal may get."""

    def limit(value: str) -> str:
        if len(value) <= most and value.isprintable():
            return value
        return clean(value[:most])

    return limit


def exact(most: int) -> Limit:
    """Return a limit that refuses a text that is longer, or has control characters other than tabs and line breaks."""

    def limit(value: str) -> str:
        if len(value) > most:
            raise Wrong(
                f"a text of {len(value):,} characters (at most {most:,} are allowed)"
            )
        if _CONTROL.search(value):
            raise Wrong("a control character")
        return value

    return limit


def percent_encoded(most: int) -> Limit:
    """Return a limit that refuses what is not percent-encoded, or means more bytes."""

    def limit(value: str) -> str:
        is_long = len(value) > 3 * most or len(unquote_to_bytes(value)) > most
        if is_long or not _PERCENT_ENCODED.fullmatch(value):
            raise Wrong("no percent-encoded text, or a very long one")
        return value

    return limit


def items(most: int) -> Limit:
    """Return a limit that keeps the first items of a list or of a table."""

    def limit(value: Any) -> Any:
        if len(value) <= most:
            return value
        if isinstance(value, tuple):
            return value[:most]
        return dict(islice(value.items(), most))

    return limit


def metrics(most: int) -> Limit:
    """Return a limit that keeps the first entries of a table of metrics. Any of them may be infinite, or no number."""
    keep, name = items(most), _text(sanitize.line, 200)

    def limit(value: dict[str, float]) -> dict[str, float]:
        return {name(key): one for key, one in keep(value).items()}

    return limit


_KINDS: dict[str, Callable[..., Limit]] = {
    "whole": whole,
    "exact_whole": exact_whole,
    "line": partial(_text, sanitize.line),  # one line, without control characters
    "lines": partial(_text, sanitize.lines),  # with line breaks and tabs
    "log": partial(_text, sanitize.log),  # what a rank prints: colours, too
    "exact": exact,
    "percent_encoded": percent_encoded,
    "items": items,
    "metrics": metrics,
}


def limit_of(kind: str, *arguments: float, is_optional: bool = False) -> Limit:
    """Return the function that keeps a value within a bound; a field that is optional may be None."""
    if kind == "number":
        return number(*arguments, is_optional=is_optional)
    return _KINDS[kind](*arguments)


@dataclass(frozen=True, kw_only=True)
class FirstReply:
    """What a host says of itself before our own half runs there; see `distmagic.remote.contact.boot`.

    `python` is the version of its Python. `have`: the bundle is there. `error`: why nothing can be written there.
    """

    python: Annotated[tuple[Count, ...], "items", 3] = ()
    home: Annotated[str, "line", 500] = ""
    have: bool = False
    error: Annotated[str, "lines", 500] = ""
    executable: Annotated[str, "line", 500] | None = None
    system: Word = ""


DECODER = codec.Decoder(limit_of)


def first_reply(text: bytes, host: str) -> FirstReply:
    """Return what a host says of itself before our own half runs there. Raises `ProtocolError`."""
    try:
        return DECODER.from_plain(FirstReply, json.loads(text))
    except (ValueError, RecursionError):  # `BadLine` is a ValueError, too
        raise ProtocolError(
            f"{host} sent {text[:80]!r} instead of its first answer."
        ) from None
