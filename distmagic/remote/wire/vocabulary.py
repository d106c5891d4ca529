"""The words in text fields of messages that have a fixed set of values: why ranks are stopped, how a rank ended.

On the wire these words are plain text: another version of distmagic may write a word that this one doesn't know. So a
reader converts the text to the type first; `known_stop_reason` does it for reasons.
"""

from __future__ import annotations

from typing import Literal, get_args

# Why the ranks of a node, or of all nodes, are ended before they have ended by themselves.
StopReason = Literal[
    "failed",  # a rank, or torchrun, failed
    "lost",  # a node was lost, or this node lost the others
    "lease",  # no notebook renewed the lease
    "interrupted",  # Ctrl-C
    "timeout",  # --timeout ran out
    "rendezvous",  # a node can't dial the endpoint
    "hung",  # no rank advanced for --hang-timeout
    "stopped",  # `%distributed stop`, also from another notebook
    "the agent was asked to end",  # SIGTERM came to the agent
    "gang",  # --detach, but the nodes don't hear each other
    "abandoned",  # the notebook's own code failed
    "too late",  # a node came to an elastic job that was over
    "another host could not start",
    "terminated",  # SIGTERM came to `distmagic run`
]
STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)
# Nothing has failed: ranks are asked to end by themselves, and have the job's grace for it.
POLITE_REASONS: frozenset[StopReason] = frozenset(
    (
        "interrupted",
        "stopped",
        "terminated",
        "timeout",
        "hung",
        "lease",
        "the agent was asked to end",
    )
)

# How a rank ended. "replaced": its agent killed it, because an elastic job forms anew.
RankOutcome = Literal["returned", "raised", "exited", "signalled", "replaced"]

# What a rank had to do with process groups: it was in none; in one that did nothing; in one that did something.
GroupUse = Literal["none", "unused", "used"]


def known_stop_reason(text: str) -> StopReason:
    """Return a reason that came as text; "stopped" for one that this version doesn't know."""
    return text if text in STOP_REASONS else "stopped"
