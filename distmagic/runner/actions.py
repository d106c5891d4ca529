"""Actions that the run loop hands to other threads.

Each action blocks its thread, and ends with an event.

    action                       the event with which it ends
    Listen(node)                 every message of the node, then LinkEnded
    Reconnect(node)              Linked, or AttemptFailed
    Collect(node)                Collected
    Join(host)                   Joined, or JoinFailed
    Send(nodes, message), Close  none: the listening thread notices a broken link
    Note(node, what)             `what` itself, at once

The events below carry links and errors. Only the node table uses them; `fold` ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from distmagic.connection.link import Link
from distmagic.remote.frozen import frozen
from distmagic.remote.wire import protocol
from distmagic.state.events import Launched

# For a node that joins a run that is ending.
TOO_LATE = protocol.StopNode(grace_s=0.0, reason="too late")

# ---- actions


@frozen
class Note:
    """Fold an event of the launcher into the state of the run."""

    node_rank: int
    what: Launched


@frozen
class Listen:
    """Put every event of a node on the queue until the link ends, starting after event number
    `after`.
    """

    node_rank: int
    link: Link
    after: int


@frozen
class Reconnect:
    """Connect once to the node's host, and follow the node."""

    node_rank: int
    host_index: int
    # another notebook starts the node, so it is followed if it exists
    meets: bool = False
    after: int = 0  # number of the event after which it is followed
    broken: Link | None = None  # the previous link
    can_ask: bool = True


@frozen
class Collect:
    """Fetch the small results of a node that has ended, and then keep its link idle.

    `sizes` are bytes by rank.
    """

    node_rank: int
    link: Link
    sizes: Mapping[int, int]


@frozen
class Join:
    """Make the lead of an elastic job register a host as a new node, and start the node's agent.

    `request_id` identifies the host in the lead's `NodeAdded`.
    """

    host_index: int
    request_id: str
    broken: Link | None


@frozen
class Send:
    """Send a message over links, without confirmation."""

    links: tuple[Link, ...]
    message: protocol.Message


@frozen
class Close:
    """Close a link that is no longer needed."""

    link: Link


Action = Note | Listen | Reconnect | Collect | Join | Send | Close


# ---- events that end actions


@frozen
class LinkEnded:
    """The events of a node have ended.

    `error` is None if the agent ended; `last` is the number of the last event.
    """

    link: Link
    last: int
    error: Exception | None


@frozen
class Linked:
    """A new link follows the node."""

    link: Link


@frozen
class AttemptFailed:
    """An attempt to connect has failed.

    `error` is None if the host answered that it does not have the node.
    """

    error: Exception | None


@frozen
class Collected:
    """The small results that arrived, by rank.

    If `is_kept_idle`, the link no longer belongs to the run.
    """

    results: Mapping[int, bytes] = field(repr=False)
    is_kept_idle: bool


@frozen
class Joined:
    """The agent of a new node runs."""

    host_index: int
    request_id: str
    link: Link
    node_rank: int


@frozen
class JoinFailed:
    """A host could not become a node this time.

    `node_rank` is the node that should have started; None if there was none yet.
    """

    host_index: int
    error: Exception
    request_id: str
    node_rank: int | None = None
