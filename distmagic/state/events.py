"""The events of the launcher, which is this notebook, and `Event`, the envelope of all events that
change a run's state.

The events of hosts are messages (remote/wire/events.py). fold.py makes a state from both kinds.
"""

from __future__ import annotations

from distmagic.remote.frozen import frozen
from distmagic.remote.wire import protocol
from distmagic.remote.wire.protocol import JobTerms
from distmagic.remote.wire.vocabulary import StopReason

# reason of the loss of a node whose agent was never started, so that no process of it exists
NEVER_BEGAN = "it never began"


class Launched:
    """An event of the launcher."""


@frozen
class Connected(Launched):
    """The notebook has connected to a host and received the facts about it."""


@frozen
class Unusable(Launched):
    """A host can't take part in the run, for this reason."""

    unusable: str


@frozen
class Warned(Launched):
    """A warning for the user, in one line that names the host."""

    text: str


@frozen
class Planned(Launched):
    """The plan for all nodes."""

    addresses: tuple[str, ...]
    # the terms of their job; None: those from the start of the run
    terms: JobTerms | None = None
    # positions of the nodes in the list of hosts; None means all hosts
    present: tuple[int, ...] | None = None
    world_size: int = 0  # 0 if nodes may come and go
    # the plan chose a free port for the rendezvous, because the user named none
    chose_port: bool = False


@frozen
class Waiting(Launched):
    """The run waits for devices of a host: `waits_for` names the devices and the job that has them.

    "": the run has them now.
    """

    waits_for: str


@frozen
class Sending(Launched):
    """Progress of the upload to a node: `sent_bytes` of the `total_bytes` that the node lacked."""

    sent_bytes: int
    total_bytes: int


@frozen
class Starting(Launched):
    """A node has the payload, and the request to start its agent was sent."""


@frozen
class Abandoned(Launched):
    """The run ended before it had started on all hosts.

    `why` is a sentence that names each cause once.

    `is_wish`: the user ended it. Otherwise a host or the request was at fault.
    """

    why: str
    is_wish: bool


@frozen
class Lost(Launched):
    """A node is lost: its host, its agent or the connection to it is gone for good.

    `is_agent_gone`: the host reported that the agent has ended, so the other nodes receive no more
    heartbeats of it.
    """

    why: str
    is_agent_gone: bool = False


@frozen
class Broken(Launched):
    """The connection to a node broke. Its ranks run on, and the launcher connects again.

    `again`: the connection broke right after it was restored, before anything of the node was
    received.
    """

    why: str
    again: bool = False


@frozen
class Mended(Launched):
    """The launcher is connected to a node again. No event was lost meanwhile."""


@frozen
class Gone(Launched):
    """A node's agent has ended.

    All its events were folded before this one, and its small results were fetched.
    """


@frozen
class Swept(Launched):
    """The processes that a lost agent had left on its node were ended, except `survivors`."""

    survivors: tuple[str, ...]


@frozen
class StopRequested(Launched):
    """The message that stops the job is being sent to all nodes."""

    reason: StopReason


@frozen
class StacksWanted(Launched):
    """The user requested the stacks of all ranks; `request_id` is the ID of the request."""

    request_id: str


@frozen
class Event:
    """One event on node `node_rank`."""

    node_rank: int
    at_s: float  # when the notebook received it, in seconds since the start of the run
    # what happened; None: only time has passed
    what: protocol.Message | Launched | None
