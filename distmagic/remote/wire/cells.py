"""Messages about cells on ranks that stay: requests, which the agent forwards to ranks, and
events.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from distmagic.remote.frozen import frozen
from distmagic.remote.wire.bounds import Amount, Word, Words
from distmagic.remote.wire.codec import message, request
from distmagic.remote.wire.events import Ended
from distmagic.remote.wire.parts import GroupCalls

MOST_NAMES = 2000  # per rank
MOST_TEXT = 60_000  # bytes of a cell's text that its job keeps


@frozen
class _ToRanks:
    """Asks these ranks to do something about a cell."""

    cell: int
    ranks: tuple[int, ...]


@request
class RunCell(_ToRanks):
    """Asks these ranks to run a cell.

    Cells are numbered from 1. A rank never runs one twice, so the request may be repeated over a
    new connection.
    """

    # the cell's parcel in base64; "" if it is in `blob`
    data: str = field(default="", repr=False)
    blob: str = ""  # name of the blob that has a longer parcel
    text: str = ""  # what the user wrote, "" for an internal cell
    anew: bool = False  # the ranks first make their process group again
    # a random word: two kernels may give the same number to their cells
    kernel: str = ""


@request
class ParkAtStep(_ToRanks):
    """Asks these ranks to report their number of steps in this cell, and to wait after the next
    one.
    """


@request
class StopAtStep(_ToRanks):
    """Asks these ranks to raise KeyboardInterrupt after this step of the cell; `kind` is "step" or
    "iteration".
    """

    kind: Word
    step: int


@request
class InterruptCell(_ToRanks):
    """Asks these ranks to raise KeyboardInterrupt if they run this cell; if that takes too long,
    their process groups are broken.

    `failed` is the rank whose failure is the reason, -1 for the user's interrupt.
    """

    failed: int = -1


@request
class OthersEnded(_ToRanks):
    """Reports to these ranks of a cell that others have ended it: with `groups`, and without
    further calls.
    """

    ended: tuple[int, ...]
    groups: tuple[GroupCalls, ...] = ()


@message
class CellBegan:
    """A rank has started a cell, which is the user's or an internal one.

    `text` is the source of the user's cell, for a notebook that attaches later. One rank sends it;
    that of the others is empty. `kernel` is as in `RunCell`.
    """

    cell: int
    rank: int
    is_users: bool = False
    text: Annotated[str, "lines", MOST_TEXT] = ""
    kernel: Word = ""


@message
class StepCount:
    """The number of optimizer steps and bar iterations of a rank in a cell, when it was asked to
    wait at the next one.

    `idle_s` is the time since its last step, `step_s` the duration of that step.
    """

    cell: int
    rank: int
    steps: int
    iterations: int
    idle_s: Amount
    step_s: Amount


@message
class CellEnded:
    """A rank has ended a cell; its process stays."""

    cell: int
    rank: int
    ended: Ended  # how the cell ended, like the end of a rank
    shown: Annotated[str, "lines", 4000] = ""  # the repr of the last expression
    # the parcel of the last expression in base64, "" if it is too large
    value: Annotated[str, "line", 200_000] = ""
    names: Words = ()  # the names that cells on the rank have assigned
    groups: tuple[GroupCalls, ...] = ()  # its process groups
    holders: Words = ()  # variables that hold a process group
    is_broken: bool = False  # its process groups were broken
    # sizes of its logs of stdout and stderr at this end; its agent adds them
    logged: tuple[int, ...] = ()


# Messages that the agent forwards to ranks, and events of ranks that it journals.
HandedOn = RunCell | ParkAtStep | StopAtStep | InterruptCell | OthersEnded
OfCells = CellBegan | StepCount | CellEnded
