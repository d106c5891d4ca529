"""Folds the events of the launcher: connecting to hosts, sending the payload, losing and finding
nodes. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from distmagic.state.builder import Handlers, RunStateBuilder
from distmagic.state.events import (
    Abandoned,
    Broken,
    Connected,
    Gone,
    Lost,
    Mended,
    Planned,
    Sending,
    StacksWanted,
    Starting,
    StopRequested,
    Swept,
    Unusable,
    Waiting,
    Warned,
)
from distmagic.state.phases import NodePhase

# The first phase changes nothing.
_PHASES: dict[type, NodePhase] = {
    Unusable: "connecting",
    Waiting: "connecting",
    Connected: "connected",
    Sending: "sending",
    Gone: "gone",
    Swept: "clear",
}


def _advanced(builder: RunStateBuilder, node: int, what: object) -> None:
    """Move a node to the phase of an event, and copy the event's fields to the node."""
    builder.advance(node, _PHASES[type(what)], **vars(what))


# ---- until a node starts


def _warned(builder: RunStateBuilder, _: int, what: Warned) -> None:
    builder.notice(what.text)


def _planned(builder: RunStateBuilder, _: int, what: Planned) -> None:
    if what.present is not None:
        listed = builder.nodes
        builder.nodes = [
            replace(listed[index], node_rank=node)
            for node, index in enumerate(what.present)
        ]
    if what.terms is not None:
        builder.terms = what.terms
    for node, address in enumerate(what.addresses[: len(builder.nodes)]):
        builder.change_node(node, address=address)
    builder.world_size = what.world_size
    builder.chose_port = what.chose_port


def _starting(builder: RunStateBuilder, node: int, _: Starting) -> None:
    builder.advance(node, "starting")
    if builder.started_at_s is None:
        builder.started_at_s = builder.at_s


def _abandoned(builder: RunStateBuilder, _: int, what: Abandoned) -> None:
    builder.abandoned = what.why
    builder.stopping = builder.stopping or ("interrupted" if what.is_wish else "")


# ---- while it runs


def _broken(builder: RunStateBuilder, node: int, what: Broken) -> None:
    old = builder.nodes[node]
    is_still_away = bool(old.broken) or (what.again and old.broken_at_s > 0.0)
    since_s = old.broken_at_s if is_still_away else builder.at_s
    builder.change_node(node, broken=what.why, broken_at_s=since_s)


def _mended(builder: RunStateBuilder, node: int, _: Mended) -> None:
    builder.note_reached()
    builder.change_node(node, broken="")
    # A rank may have advanced: the events of the time without a connection are still to come.
    builder.note_advance()


def _lost(builder: RunStateBuilder, node: int, what: Lost) -> None:
    # The message itself names the host.
    why = what.why.removeprefix(f"{builder.nodes[node].host}: ")
    builder.lose(node, why)
    if what.is_agent_gone:
        builder.change_node(node, is_agent_gone=True)


def _stopping(builder: RunStateBuilder, _: int, what: StopRequested) -> None:
    builder.stopping = builder.stopping or what.reason


def _stacks_wanted(builder: RunStateBuilder, _: int, what: StacksWanted) -> None:
    builder.wanted_stacks = what.request_id


HANDLERS: Handlers = {
    **dict.fromkeys(_PHASES, _advanced),
    Warned: _warned,
    Planned: _planned,
    Starting: _starting,
    Abandoned: _abandoned,
    Broken: _broken,
    Mended: _mended,
    Lost: _lost,
    StopRequested: _stopping,
    StacksWanted: _stacks_wanted,
}
