"""The values of text fields with a fixed set of values: why ranks are stopped, and how a rank
ended.

In messages they are plain text: another version of distmagic may send a value that this one does
not know. So a reader first converts the text to the type; `known_stop_reason` does that for
reasons.
"""

from __future__ import annotations

from typing import Literal, get_args

# Why the ranks of a node, or of all nodes, are ended before they end by themselves.
StopReason = Literal[
    "failed",  # a rank, or torchrun, failed
    "lost",  # a node was lost, or this node lost the others
    "lease",  # no notebook renewed the lease
    "interrupted",  # Ctrl-C
    "timeout",  # --timeout expired
    "rendezvous",  # a node can't connect to the endpoint
    "hung",  # no rank advanced for --hang-timeout
    "stopped",  # `%distributed stop`, also from another notebook
    "the agent was asked to end",  # the agent received SIGTERM
    "gang",  # --detach, but the nodes receive no heartbeats of each other
    "abandoned",  # the notebook's own code failed
    "too late",  # a node joined an elastic job that was over
    "another host could not start",
    "terminated",  # `distmagic run` received SIGTERM
    "idle",  # ranks that stay had no cell for too long, and no notebook would have ended them
]
STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)
# Nothing has failed: ranks are asked to end by themselves, within the job's grace time.
POLITE_REASONS: frozenset[StopReason] = frozenset(
    (
        "interrupted",
        "stopped",
        "terminated",
        "timeout",
        "hung",
        "lease",
        "idle",
        "the agent was asked to end",
    )
)

# How a rank ended. "replaced": its agent killed it, because an elastic job restarts its ranks.
RankOutcome = Literal["returned", "raised", "exited", "signalled", "replaced"]

# A rank's use of process groups: it had none; it made no call in any; it made calls.
GroupUse = Literal["none", "unused", "used"]


def known_stop_reason(text: str) -> StopReason:
    """Return a reason received as text; "stopped" for an unknown one."""
    return text if text in STOP_REASONS else "stopped"
