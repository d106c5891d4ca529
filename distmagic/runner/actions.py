"""What the run loop has done outside of its own thread. Each action is one blocking act; it ends in an event.

    action                       the event with which it ends
    Listen(node)                 every message of the node, then LinkEnded
    Reconnect(node)              Linked, or AttemptFailed
    Collect(node)                Collected
    Join(host)                   Joined, or JoinFailed
    Send(nodes, message), Close  none: the listening thread notices a broken link
    Note(node, what)             `what` itself, at once

The events below carry links and errors. They are for the node table alone; `fold` ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distmagic.connection.link import Link
from distmagic.remote.wire import protocol
from distmagic.state.events import Launched

TOO_LATE = protocol.StopNode(
    grace_s=0.0, reason="too late"
)  # of a node that joins a run that ends

# ---- actions


@dataclass(frozen=True, kw_only=True)
class Note:
    """Fold an event of the launcher into the state of the run."""

    node_rank: int
    what: Launched


@dataclass(frozen=True, kw_only=True)
class Listen:
    """Put every event of a node on the queue until the link ends; the first one comes after event number `after`."""

    node_rank: int
    link: Link
    after: int


@dataclass(frozen=True, kw_only=True)
class Reconnect:
    """Connect once to the node's host, and follow the node after event number `after`. `broken` is the link before.

    `meets`: another notebook starts the node, so it is followed if it is there.
    """

    node_rank: int
    host_index: int
    meets: bool = False
    after: int = 0
    broken: Link | None = None
    can_ask: bool = True


@dataclass(frozen=True, kw_only=True)
class Collect:
    """Fetch the small results of a node that has ended, then keep its link idle. `sizes` are bytes by rank."""

    node_rank: int
    link: Link
    sizes: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class Join:
    """Have the lead of an elastic job count a host as a new node, and start its agent.

    `request_id` names it in the lead's `NodeAdded`.
    """

    host_index: int
    request_id: str
    broken: Link | None


@dataclass(frozen=True, kw_only=True)
class Send:
    """Send a message over links, whether or not it arrives."""

    links: tuple[Link, ...]
    message: protocol.Message


@dataclass(frozen=True, kw_only=True)
class Close:
    """Close a link of which nothing more is wanted."""

    link: Link


Action = Note | Listen | Reconnect | Collect | Join | Send | Close


# ---- events with which actions end


@dataclass(frozen=True, kw_only=True)
class LinkEnded:
    """A node's events came to their end. `error` is None where the agent ended; `last` is the last event's number."""

    link: Link
    last: int
    error: Exception | None


@dataclass(frozen=True, kw_only=True)
class Linked:
    """A new link follows the node."""

    link: Link


@dataclass(frozen=True, kw_only=True)
class AttemptFailed:
    """There is no new link yet. `error` is None where the host answered and does not have the node."""

    error: Exception | None


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The small results that came, by rank. The link is no longer the run's if `is_kept_idle`."""

    results: Mapping[int, bytes] = field(repr=False)
    is_kept_idle: bool


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The agent of a new node runs."""

    host_index: int
    request_id: str
    link: Link
    node_rank: int


@dataclass(frozen=True, kw_only=True)
class JoinFailed:
    """A host could not become a node this time.

    `node_rank` is the node whose start it was asked for, None before that.
    """

    host_index: int
    error: Exception
    request_id: str
    node_rank: int | None = None
