"""What notebook and ranks say about cells of ranks that stay: requests, which the agent hands on, and events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from distmagic.remote.wire.bounds import (
    MOST_RANKS,
    Count,
    Exact,
    RankNumber,
    Size,
    Word,
)
from distmagic.remote.wire.codec import message, request
from distmagic.remote.wire.events import Ended

_Ranks = Annotated[tuple[RankNumber, ...], "items", MOST_RANKS]
MOST_NAMES = 2000  # of one rank


@request
@dataclass(frozen=True, kw_only=True)
class RunCell:
    """Have these ranks run a cell, whose parcel is `data` in base64, or the blob of this name where it is longer.

    Cells are numbered from 1. A rank runs none a second time: the request may come again over a new connection.
    """

    cell: Count
    ranks: _Ranks
    data: Exact = ""
    blob: Exact = ""


@request
@dataclass(frozen=True, kw_only=True)
class InterruptCell:
    """Raise KeyboardInterrupt in these ranks, if they are at this cell."""

    cell: Count
    ranks: _Ranks


@message
@dataclass(frozen=True, kw_only=True)
class CellBegan:
    """A rank begins with a cell. `log_bytes` is how long its stdout and stderr were, as the agent adds."""

    cell: Count
    rank: RankNumber
    log_bytes: Annotated[tuple[Size, ...], "items", 2] = ()


@message
@dataclass(frozen=True, kw_only=True)
class CellEnded:
    """A rank has ended a cell as `ended` says, in which the end of a rank is told; its process stays.

    `shown` is the repr of the last expression, and `value` its parcel in base64, "" where that is long. `names` are
    those that its cells have given values to.
    """

    cell: Count
    rank: RankNumber
    ended: Ended
    shown: Annotated[str, "lines", 4000] = ""
    value: Exact = ""
    names: Annotated[tuple[Word, ...], "items", MOST_NAMES] = ()
