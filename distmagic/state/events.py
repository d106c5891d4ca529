"""The events that change a run's state: those of the launcher, which is this notebook, and the envelope of all events.

The events of hosts are messages (remote/wire/events.py). fold.py makes a state from both.
"""

from __future__ import annotations

from dataclasses import dataclass

from distmagic.remote.wire import protocol
from distmagic.remote.wire.vocabulary import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """A host was reached, and has told what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable:
    """A host can't take part, and why."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """Something that the user should know of, in one line that names the host."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the plan says of all nodes, their addresses and how many of them the job needs.

    `present` are the places in the list of hosts of those that are nodes; None: they all are.
    """

    addresses: tuple[str, ...]
    min_nodes: int
    present: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """So much of the payload has been sent to a node, of what it lacks."""

    sent_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """A node has all it needs, and was told to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """The run ended before it had begun on all hosts; `why` is a sentence, no cause named twice.

    By the user if `is_wish`, else because of what was wrong with a host or the request.
    """

    why: str
    is_wish: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The connection to a node, or its agent, is gone."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A connection broke; the ranks go on, and it is tried again."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """A broken connection stands again, and no event was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A node's agent has said all and is gone, and what is wanted of it has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a lost agent had left running on a node was ended, but for `survivors`."""

    survivors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """All nodes are being told to stop the job."""

    reason: StopReason


Launched = (
    Connected
    | Unusable
    | Warned
    | Planned
    | Sending
    | Starting
    | Abandoned
    | Lost
    | Swept
    | Broken
    | Mended
    | Gone
    | StopRequested
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened: on which node, when by the notebook's clock (seconds since the run began), what.

    None is the clock's own: nothing happened, but time has passed.
    """

    node_rank: int
    at_s: float
    what: protocol.Message | Launched | None
