"""Folds the events of the launcher: hosts that it connects to, sends the payload to, loses and finds again. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distmagic.state.builder import RunStateBuilder
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

# ---- until a node starts


def _connected(draft: RunStateBuilder, node: int, _: Connected) -> None:
    draft.advance(node, "connected")


def _unusable(draft: RunStateBuilder, node: int, what: Unusable) -> None:
    draft.nodes[node] = replace(draft.nodes[node], unusable=what.why)


def _warned(draft: RunStateBuilder, _: int, what: Warned) -> None:
    draft.notice(what.text)


def _planned(draft: RunStateBuilder, _: int, what: Planned) -> None:
    if what.present is not None:
        listed = draft.nodes
        draft.nodes = [
            replace(listed[index], node_rank=node)
            for node, index in enumerate(what.present)
        ]
    draft.min_nodes = what.min_nodes or len(draft.nodes)
    for node, address in enumerate(what.addresses[: len(draft.nodes)]):
        draft.nodes[node] = replace(draft.nodes[node], address=address)
    for node, ranks in enumerate(what.ranks[: len(draft.nodes)]):
        draft.nodes[node] = replace(draft.nodes[node], ranks=ranks)
    draft.planned_world_size = what.world_size


def _waiting(draft: RunStateBuilder, node: int, what: Waiting) -> None:
    draft.nodes[node] = replace(draft.nodes[node], waits_for=what.what)


def _sending(draft: RunStateBuilder, node: int, what: Sending) -> None:
    draft.advance(
        node, "sending", sent_bytes=what.sent_bytes, total_bytes=what.total_bytes
    )


def _starting(draft: RunStateBuilder, node: int, _: Starting) -> None:
    draft.advance(node, "starting")
    if draft.started_at_s is None:
        draft.started_at_s = draft.at_s


def _abandoned(draft: RunStateBuilder, _: int, what: Abandoned) -> None:
    draft.abandoned = what.why
    draft.stopping = draft.stopping or ("interrupted" if what.is_wish else "")


# ---- while it runs


def _broken(draft: RunStateBuilder, node: int, what: Broken) -> None:
    old = draft.nodes[node]
    since_s = old.broken_at_s if old.broken else draft.at_s
    draft.nodes[node] = replace(old, broken=what.why, broken_at_s=since_s)


def _mended(draft: RunStateBuilder, node: int, _: Mended) -> None:
    draft.nodes[node] = replace(draft.nodes[node], broken="")
    # A rank may have advanced: the events of the time without a connection are only coming.
    draft.note_advance()


def _gone(draft: RunStateBuilder, node: int, _: Gone) -> None:
    draft.advance(node, "gone")


def _lost(draft: RunStateBuilder, node: int, what: Lost) -> None:
    draft.lose(node, what.why)


def _swept(draft: RunStateBuilder, node: int, what: Swept) -> None:
    draft.advance(node, "clear", survivors=what.survivors)


def _stopping(draft: RunStateBuilder, _: int, what: StopRequested) -> None:
    draft.stopping = draft.stopping or what.reason


def _stacks_wanted(draft: RunStateBuilder, _: int, what: StacksWanted) -> None:
    draft.wanted_stacks = what.request_id


HANDLERS: dict[type, Callable[..., None]] = {
    Connected: _connected,
    Unusable: _unusable,
    Warned: _warned,
    Planned: _planned,
    Waiting: _waiting,
    Sending: _sending,
    Starting: _starting,
    Abandoned: _abandoned,
    Gone: _gone,
    Broken: _broken,
    Mended: _mended,
    Lost: _lost,
    Swept: _swept,
    StopRequested: _stopping,
    StacksWanted: _stacks_wanted,
}
