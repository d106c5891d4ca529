"""The phases of nodes, ranks and runs, and what each reason of a stop means.

Hosts send the reasons too, so their list is in remote/wire/vocabulary.py. All other lists of such
words are in this module or derived from it. So a new word needs a meaning in one place only.
"""

from __future__ import annotations

from typing import Literal, get_args

from distmagic.remote.frozen import frozen

# A node goes through these in this order, and may skip some. ended: torchrun has ended. clear: no
# process is left. gone: the agent has ended too, and all its events have arrived.
NodePhase = Literal[
    "connecting",
    "connected",
    "sending",
    "starting",
    "running",
    "ended",
    "clear",
    "gone",
]
NODE_PHASES: tuple[NodePhase, ...] = get_args(NodePhase)
OPENING: tuple[NodePhase, ...] = NODE_PHASES[:4]  # before any rank exists

# stopped: ended by the agent or by torchrun. lost: its node was lost.
RankPhase = Literal["starting", "running", "done", "failed", "stopped", "lost"]
ALIVE: tuple[RankPhase, ...] = ("starting", "running")

RunPhase = Literal[
    "connecting",
    "waiting",
    "sending",
    "starting",
    "running",
    "stopping",
    "done",
    "failed",
    "stopped",
    "lost",
]

# The state of a node at the other nodes. silent: they have never received a datagram of it. "":
# unknown.
GangState = Literal["", "joined", "silent", "lost"]


@frozen
class StopMeaning:
    """What follows from one reason of a stop."""

    # this notebook decided to stop the run: for the user, at a time limit, or because the nodes
    # don't meet; no node failed
    is_wish: bool = False
    # the rest of the state has the cause, a failed rank or a lost node
    is_explained: bool = False
    in_row: str = "stopped"  # the text in the row of a host without ranks


STOP_MEANINGS: dict[str, StopMeaning] = {
    **dict.fromkeys(("failed", "lost"), StopMeaning(is_explained=True)),
    **dict.fromkeys(
        (
            "interrupted",
            "terminated",
            "timeout",
            "rendezvous",
            "hung",
            "gang",
            "abandoned",
        ),
        StopMeaning(is_wish=True),
    ),
    "lease": StopMeaning(in_row="stopped: this notebook did not renew its lease"),
    "stopped": StopMeaning(),
    "the agent was asked to end": StopMeaning(in_row="the agent was asked to end"),
    "idle": StopMeaning(in_row="stopped: no cell ran on its ranks"),
    "too late": StopMeaning(in_row="came too late"),
    "another host could not start": StopMeaning(
        in_row="stopped: another host could not start"
    ),
}


def meaning_of(reason: str) -> StopMeaning:
    """Return the meaning of a reason; any other text is an agent's own, such as that of a crash."""
    if reason in ("", "done"):
        return StopMeaning(is_explained=True, in_row="")
    return STOP_MEANINGS.get(reason, StopMeaning(in_row=reason))
