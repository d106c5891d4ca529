"""The rows of the table of nodes: a node, a host that will join, and the times of retries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from distmagic.connection.link import Link
from distmagic.remote.frozen import frozen
from distmagic.remote.wire import protocol
from distmagic.runner.actions import Joined
from distmagic.state.events import NEVER_BEGAN

FIRST_PAUSE_S = 0.25  # pause between attempts to connect
LONGEST_PAUSE_S = 5.0


@frozen
class Attempts:
    """Repeated attempts: the time of the next one (None during an attempt), the pause after it, and
    the deadline.
    """

    next_at_s: float | None
    pause_s: float = FIRST_PAUSE_S
    until_s: float | None = None

    def again(self, now_s: float, least_s: float = 0.0) -> Attempts:
        """Return the next attempt, after at least `least_s`; the pause doubles each time, up to 5
        s.
        """
        pause_s = max(least_s, min(2 * self.pause_s, LONGEST_PAUSE_S))
        return replace(self, next_at_s=now_s + pause_s, pause_s=pause_s)


@dataclass(kw_only=True)
class NodeRow:
    """One node."""

    host_index: int
    link: Link | None = None
    state: Literal[
        "waiting", "following", "reconnecting", "meeting", "collecting", "gone", "lost"
    ] = "waiting"
    last: int = 0  # number of its last event
    is_final: bool = False
    is_missed: bool = False  # it ended because it, or the network to it, was lost
    # bytes of small results, by rank
    sizes: dict[int, int] = field(default_factory=dict)
    stop: protocol.StopNode | None = None  # the message that stopped it
    attempts: Attempts | None = None
    can_ask: bool = True
    # the reason for its loss if it can't be found: its host has no such node, or did not answer
    why_unmet: str = NEVER_BEGAN
    why_lost: str = ""  # the reason for its loss
    linked_at_s: float = 0.0  # when it got a new link after a broken one
    is_agent_gone: bool = False  # its host reported that the agent has ended


@dataclass(kw_only=True)
class HostJoin:
    """A host that will become a node of an elastic job."""

    own: set[int]  # the nodes that it was, or should be, through this notebook
    attempts: Attempts
    broken: Link | None = None
    request_id: str = ""
    node_rank: int | None = None  # its number from the lead
    # its agent runs already, but the lead's event has not arrived yet
    joined: Joined | None = None


@frozen
class Growth:
    """How hosts join an elastic job: `host_names` by host index; the `awaited` hosts were absent at
    the start.
    """

    host_names: Sequence[str]
    awaited: Collection[int] = ()
