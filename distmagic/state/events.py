"""The events that change a run's state: those of the launcher, which is this notebook, and the envelope of all events.

The events of hosts are messages (remote/wire/events.py). fold.py makes a state from both.
"""

from __future__ import annotations

from dataclasses import dataclass

from distmagic.remote.wire import protocol
from distmagic.remote.wire.protocol import JobTerms
from distmagic.remote.wire.vocabulary import StopReason

NEVER_BEGAN = "it never began"  # why a node is lost whose agent was not even started: nothing of it runs


@dataclass(frozen=True, kw_only=True)
class Connected:
    """The notebook has connected to a host and has its facts."""


@dataclass(frozen=True, kw_only=True)
class Unusable:
    """A host can't take part in the run, for the reason `why`."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Warned:
    """A warning for the user, in one line that names the host."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What the plan says of all nodes: their addresses, and the terms of their job; None: those that the run began with.

    `present` are the places in the list of hosts of those that are nodes; None: they all are. `world_size` is 0 where
    nodes may come and go.
    `chose_port`: that of the rendezvous was a free one, which the user has not named.
    """

    addresses: tuple[str, ...]
    terms: JobTerms | None = None
    present: tuple[int, ...] | None = None
    world_size: int = 0
    chose_port: bool = False


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A host's devices belong to other jobs: `what` says which, and to whom. "": the run has them now."""

    what: str


@dataclass(frozen=True, kw_only=True)
class Sending:
    """`sent_bytes` of the payload were sent to a node, which lacked `total_bytes` of it."""

    sent_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Starting:
    """A node has the payload, and the message that starts its agent was sent."""


@dataclass(frozen=True, kw_only=True)
class Abandoned:
    """The run ended before it had begun on all hosts. `why` is a sentence that names each cause once.

    `is_wish`: the user ended it. Else something was wrong with a host or with the request.
    """

    why: str
    is_wish: bool


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A node counts as lost: its host, its agent or the way there is gone for good.

    `is_agent_gone`: its host has said that its agent has ended, so no other node can hear it.
    """

    why: str
    is_agent_gone: bool = False


@dataclass(frozen=True, kw_only=True)
class Broken:
    """The connection to a node broke. Its ranks go on, and the launcher connects again.

    `again`: it ended at once after it had been mended, so that nothing was heard of the node meanwhile.
    """

    why: str
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class Mended:
    """The launcher is connected to a node again. No event was lost meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Gone:
    """A node's agent has ended. All its events were folded before this one, and its small results were fetched."""


@dataclass(frozen=True, kw_only=True)
class Swept:
    """The processes that a lost agent had left on its node were ended, but for `survivors`."""

    survivors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StopRequested:
    """The message that stops the job is being sent to all nodes."""

    reason: StopReason


@dataclass(frozen=True, kw_only=True)
class StacksWanted:
    """The user wants to see where the ranks are; `request_id` names the request for their stacks."""

    request_id: str


Launched = (
    Connected
    | Unusable
    | Warned
    | Planned
    | Waiting
    | Sending
    | Starting
    | Abandoned
    | Lost
    | Swept
    | Broken
    | Mended
    | Gone
    | StopRequested
    | StacksWanted
)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event: `what` happened on node `node_rank`.

    `at_s` is the time at which the notebook got it, in seconds since the run began. `what` None: only time has passed.
    """

    node_rank: int
    at_s: float
    what: protocol.Message | Launched | None
