"""Folds events into the state of a run.

Pure. fold_ranks.py and fold_launcher.py have the rest of the handlers.

    Events  --fold-->  RunState  --render-->  text, HTML, widgets

`fold` takes a batch, so that a thousand ranks at 10 Hz cost one copy of the tables per batch
instead of one per event. Events of different nodes come in any order. No event of a host makes
`fold` raise or the state grow without limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from distmagic.failures import failure_kind
from distmagic.remote.wire import protocol
from distmagic.remote.wire.bounds import MOST_NODES
from distmagic.remote.wire.protocol import JobTerms
from distmagic.remote.wire.vocabulary import known_stop_reason
from distmagic.state import fold_launcher, fold_ranks
from distmagic.state.builder import Handlers, RunStateBuilder
from distmagic.state.events import Event
from distmagic.state.model import ANY_TERMS, NodeState, RunState
from distmagic.state.phases import GangState
from distmagic.state.standstill import IDLE_SHARE

_GANG: dict[str, GangState] = {
    "joined": "joined",
    "back": "joined",
    "silent": "silent",
    "lost": "lost",
}
SKIPPED = "some older reports and lines of output are left out: its journal no longer has them (its logs may)"
# Longest gap between two measurements; agents measure every two seconds.
_UNSEEN_S = 60.0
UNHEARD = "none of its heartbeats reached the other hosts"


def begin(
    job: str,
    hosts: Iterable[str],
    terms: JobTerms = ANY_TERMS,
    notices: tuple[str, ...] = (),
    addresses: Sequence[str] = (),
) -> RunState:
    """Return the state of a run without events.

    `addresses` are those of the first hosts, as far as known.
    """
    nodes = []
    for i, host in enumerate(hosts):
        address = addresses[i] if i < len(addresses) else ""
        nodes.append(NodeState(node_rank=i, host=host, address=address))
    return RunState(job=job, nodes=tuple(nodes), terms=terms, notices=notices)


def fold(state: RunState, events: Iterable[Event]) -> RunState:
    """Return the state after `events`."""
    builder = RunStateBuilder(state)
    for event in events:
        builder.let_pass(event.at_s)
        node, what = event.node_rank, event.what
        if not 0 <= node < len(builder.nodes):
            continue
        if handler := _HANDLERS.get(type(what)):
            handler(builder, node, what)
        elif handler := fold_ranks.OF_A_RANK.get(type(what)):
            worker = builder.rank_of(node, getattr(what, "rank", -1))
            if worker is not None:
                handler(builder, worker, what)
    return builder.freeze()


# ---- a node's own events


def _hello(builder: RunStateBuilder, node: int, what: protocol.Hello) -> None:
    builder.note_reached()
    builder.advance(node, "starting", hostname=what.hostname)


def _endpoint(builder: RunStateBuilder, node: int, what: protocol.Endpoint) -> None:
    if what.state == "open":
        builder.endpoint_open_at_s = builder.at_s
    elif what.state == "unreached":
        builder.unreached[node] = what.detail
    elif builder.stopping != "rendezvous":
        # Otherwise it remains the reason of the stop.
        builder.unreached.pop(node, None)


def _notice(builder: RunStateBuilder, node: int, what: protocol.Notice) -> None:
    builder.notice(f"{builder.nodes[node].host}: {what.text}")


def _skipped(builder: RunStateBuilder, node: int, _: protocol.Skipped) -> None:
    for worker in list(builder.workers.values()):
        if worker.node_rank == node:
            # The next text does not continue the line before the gap.
            builder.close_lines(worker.rank, node)
    builder.close_lines(-1, node)
    _notice(builder, node, protocol.Notice(text=SKIPPED))


def _engine_ended(
    builder: RunStateBuilder, node: int, what: protocol.EngineEnded
) -> None:
    builder.advance(node, "ended", code=what.code)
    if what.code != 0 and builder.failed_node is None:
        # Only a node that neither its agent nor a stop of the run has ended.
        failed_itself = builder.nodes[node].stopping in ("", "failed")
        if failed_itself and (not builder.stopping or node == builder.culprit):
            builder.failed_node = node
    failed_afterwards = False
    for exit_ in what.exits:
        worker = builder.rank_of(node, exit_.rank)
        if worker is not None:
            builder.change_rank(exit_.rank, exit=exit_)
            failed_afterwards |= failure_kind.has_failed_afterwards(worker.ended, exit_)
    # Undo a first failure that torchrun caused: it sent SIGTERM because another rank of the node
    # failed after its return.
    if not failed_afterwards or builder.first_failure is None:
        return
    first = builder.workers[builder.first_failure]
    if (
        first.node_rank == node
        and first.ended
        and failure_kind.is_by_sigterm(first.ended)
    ):
        builder.change_rank(first.rank, phase="stopped")
        builder.first_failure = None
        builder.failed_node = node


def _peer_state(builder: RunStateBuilder, _: int, what: protocol.PeerState) -> None:
    """Fold the lead's state of a member, or a member's state of the lead."""
    peer = what.node_rank
    if not 0 <= peer < len(builder.nodes) or what.state not in _GANG:
        return
    if builder.base.is_elastic and peer == 0 and what.state in ("silent", "lost"):
        # A member that lost its own network would report the same of a healthy lead.
        return
    builder.change_node(peer, gang=_GANG[what.state])
    if what.state == "lost":
        _accuse(builder, peer)
    elif what.state == "back" or (what.state == "joined" and builder.base.is_elastic):
        # An elastic job continues, even if this notebook lost the node before the other nodes did.
        builder.change_node(peer, accused_at_s=None)
        if not builder.base.is_over:  # else this notebook no longer follows it
            builder.find_again(peer)


def _node_added(builder: RunStateBuilder, _: int, what: protocol.NodeAdded) -> None:
    """Add the nodes that have joined an elastic job."""
    for host in what.hosts[len(builder.nodes) : MOST_NODES]:
        builder.nodes.append(
            NodeState(node_rank=len(builder.nodes), host=host, phase="starting")
        )


def _node_stopping(
    builder: RunStateBuilder, node: int, what: protocol.NodeStopping
) -> None:
    """Fold the reason why a node ends its ranks. The first such reason is the run's reason."""
    reason = known_stop_reason(what.reason)
    culprit = what.culprit if 0 <= what.culprit < len(builder.nodes) else None
    builder.change_node(node, stopping=reason, culprit=culprit, accused_at_s=None)
    if builder.base.is_elastic and what.reason == "lost" and node != 0:
        return  # only this node ends: it has lost the other nodes, which continue
    if not builder.stopping:
        builder.stopping = reason
        builder.culprit = culprit
    if what.reason == "lost" and culprit is not None:
        _accuse(builder, culprit)


def _accuse(builder: RunStateBuilder, node: int) -> None:
    """Record that other nodes receive no heartbeats of a node.

    An elastic job continues without it, so it is lost at once. In any other job, the node may still
    report why it ends: then only the network between the nodes has failed. decide.py sets how long
    to wait for that.
    """
    if builder.base.is_elastic:
        builder.lose(node, UNHEARD)
    elif not builder.nodes[node].stopping and builder.nodes[node].accused_at_s is None:
        builder.change_node(node, accused_at_s=builder.at_s)


def _hardware(builder: RunStateBuilder, node: int, what: protocol.Hardware) -> None:
    # A GPU that is no longer visible keeps its peak.
    old = builder.nodes[node].gpu_peaks
    used = [gpu.used_bytes or 0 for gpu in what.gpus]
    builder.change_node(
        node,
        hardware=what,
        gpu_peaks=tuple(map(max, zip_longest(old, used, fillvalue=0))),
        gpus_idle_s=_idle_s(builder, node, what),
        looked_at_s=builder.at_s,
    )


def _idle_s(builder: RunStateBuilder, node: int, what: protocol.Hardware) -> float:
    """Return for how long the GPUs of a node's ranks have been idle.

    A long gap between measurements resets it.
    """
    old = builder.nodes[node]
    past_s = builder.at_s - old.looked_at_s
    own = {
        worker.gpu for worker in builder.workers.values() if worker.node_rank == node
    }
    shares = [gpu.utilization for place, gpu in enumerate(what.gpus) if place in own]
    is_at_work = any(share is None or share >= IDLE_SHARE for share in shares)
    if not shares or is_at_work or past_s > _UNSEEN_S:
        return 0.0
    return old.gpus_idle_s + past_s


def _detached(builder: RunStateBuilder, node: int, what: protocol.Detached) -> None:
    if node == 0:
        builder.detached_by = what.why or "asked"


def _final(builder: RunStateBuilder, node: int, what: protocol.Final) -> None:
    builder.advance(node, "clear", reason=what.reason, survivors=what.survivors)
    builder.close_lines(-1, node)
    builder.end_all_on(node, "stopped")


_HANDLERS: Handlers = {
    protocol.Hello: _hello,
    protocol.EngineEnded: _engine_ended,
    protocol.Endpoint: _endpoint,
    protocol.Notice: _notice,
    protocol.StacksDone: RunStateBuilder.take_dumped,
    protocol.Skipped: _skipped,
    protocol.Final: _final,
    protocol.PeerState: _peer_state,
    protocol.NodeAdded: _node_added,
    protocol.NodeStopping: _node_stopping,
    protocol.Detached: _detached,
    protocol.Hardware: _hardware,
    **fold_ranks.HANDLERS,
    **fold_launcher.HANDLERS,
}
