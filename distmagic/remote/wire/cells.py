"""What notebook and ranks say about cells of ranks that stay: requests, which the agent hands on, and events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from distmagic.remote.wire.bounds import Amount, Word
from distmagic.remote.wire.codec import message, request
from distmagic.remote.wire.events import Ended
from distmagic.remote.wire.parts import GroupCalls

MOST_NAMES = 2000  # of one rank


@request
@dataclass(frozen=True, kw_only=True)
class RunCell:
    """Have these ranks run a cell, whose parcel is `data` in base64, or the blob of this name where it is longer.

    With `anew` they make their process group anew before. Cells are numbered from 1. A rank runs none a second time: the request may come again over a new connection.
    """

    cell: int
    ranks: tuple[int, ...]
    data: str = field(default="", repr=False)
    blob: str = ""
    anew: bool = False


@request
@dataclass(frozen=True, kw_only=True)
class ParkAtStep:
    """Have these ranks report how many steps they have made in this cell, and wait after the next one."""

    cell: int
    ranks: tuple[int, ...]


@request
@dataclass(frozen=True, kw_only=True)
class StopAtStep:
    """Raise KeyboardInterrupt in these ranks after this step of the cell; `kind` is "step" or "iteration"."""

    cell: int
    ranks: tuple[int, ...]
    kind: Word
    step: int


@request
@dataclass(frozen=True, kw_only=True)
class InterruptCell:
    """Raise KeyboardInterrupt in these ranks, if they are at this cell; where that takes long, break their groups.

    `failed` is the rank whose failure is the reason, -1 where the user interrupts.
    """

    cell: int
    ranks: tuple[int, ...]
    failed: int = -1


@message
@dataclass(frozen=True, kw_only=True)
class CellBegan:
    """A rank begins with a cell."""

    cell: int
    rank: int


@message
@dataclass(frozen=True, kw_only=True)
class StepCount:
    """How many steps of optimizers and iterations of bars a rank has made in a cell when it was to wait at the next.

    `idle_s` is how long ago its last step was, `step_s` how long that took.
    """

    cell: int
    rank: int
    steps: int
    iterations: int
    idle_s: Amount
    step_s: Amount


@message
@dataclass(frozen=True, kw_only=True)
class CellEnded:
    """A rank has ended a cell as `ended` says, in which the end of a rank is told; its process stays.

    `shown` is the repr of the last expression, and `value` its parcel in base64, "" where that is long. `names` are
    those that its cells have given values to. `groups` are its process groups, `holders` the names of what holds one;
    `is_broken`: its groups were broken.
    """

    cell: int
    rank: int
    ended: Ended
    shown: Annotated[str, "lines", 4000] = ""
    value: Annotated[str, "line", 200_000] = ""
    names: tuple[Word, ...] = ()
    groups: tuple[GroupCalls, ...] = ()
    holders: tuple[Word, ...] = ()
    is_broken: bool = False


# What the agent hands on to ranks, and what it journals of theirs.
HandedOn = RunCell | ParkAtStep | StopAtStep | InterruptCell
OfCells = CellBegan | StepCount | CellEnded
