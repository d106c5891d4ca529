"""Decides what to do about a run in its current state.

Pure: the run loop carries out the decisions, in their order.

    RunState, Limits, RunMemory  --after_step, after_interrupt, stopped-->  RunMemory, Decisions

The loop calls `after_step` in every step, and the others when the user wants to end the run.
`RunMemory` has earlier decisions. If nodes are lost, that decision is folded into the state first,
so that later decisions see it.

A run is stopped for one reason: the first that `reason_to_stop` or `reason_after_inquiry` returns,
or an interrupt by the user. Before a run without progress is stopped, its ranks are asked for their
stacks; `Inquiry` remembers that request.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import Literal

from distmagic.remote.frozen import frozen
from distmagic.remote.wire.vocabulary import POLITE_REASONS, StopReason
from distmagic.state.events import Event, Lost
from distmagic.state.fold import UNHEARD, fold
from distmagic.state.model import NodeState, RunState
from distmagic.state.standstill import (
    Inquiry,
    begun_inquiry,
    hang_inquiry,
    is_worth_asking,
    look,
    reason_after_inquiry,
    timeout_inquiry,
)

GRACE_S = 3.0  # between SIGTERM and SIGKILL, after a failure
CONFIRM_S = 15.0  # a node that hasn't confirmed its end this long after SIGKILL is lost
# a node that still can't connect so long after the endpoint has opened
CLOSED_PORT_S = 5.0
# time for the endpoint to open; importing torch can take long on a slow disk
NEVER_OPEN_S = 120.0
# time until a host that only this notebook can't reach is lost; if it reaches no host, the lease
# counts
NODE_LOST_S = 10.0
# time for a host without heartbeats to report that it receives none itself
OWN_WORD_S = 1.5
# Time after the last sign of life for torchrun to restart a failed rank, if the other nodes seem to
# have ended.
RESTART_S = 15.0


@frozen
class Limits:
    """Time limits of a run.

    Time in which a rank waits for the user's input does not count for the first two.
    """

    timeout_s: float | None = None  # since the start of the run
    hang_timeout_s: float | None = None  # without progress of any rank
    # without any reachable node: a job that runs without this notebook is no longer followed
    away_s: float | None = None


# ---- decisions


@frozen
class Lose:
    """Mark a node as lost."""

    node_rank: int
    why: str


@frozen
class Stop:
    """Stop the run on these nodes, which are all that can receive the request."""

    node_ranks: tuple[int, ...]
    grace_s: float
    reason: StopReason


@frozen
class StopLate:
    """Stop nodes that joined too late, while the run ends successfully."""

    node_ranks: tuple[int, ...]


@frozen
class AskForStacks:
    """Ask all ranks for their stacks. `quietly`: only those that the request does not interrupt."""

    request_id: str
    quietly: bool = False


@frozen
class Detach:
    """Ask the lead to detach the job, so that it needs no notebook."""


@frozen
class Leave:
    """Stop following the job, which runs on by itself."""

    why: str


Decision = Lose | Stop | StopLate | AskForStacks | Detach | Leave


@frozen
class RunMemory:
    """Earlier decisions, and the user's wishes."""

    inquiry: Inquiry = field(default_factory=Inquiry)
    # when ranks without progress were last asked for their stacks without a plan to stop
    looked_at_s: float = -1.0
    # when nodes that have not confirmed their end are lost; None while the run is not stopped
    give_up_at_s: float | None = None
    stopped_late: frozenset[int] = frozenset()  # the nodes of `StopLate`
    wants_detach: bool = False  # detach the job as soon as possible
    # a detached job is no longer followed, because the user wished so or none of its hosts could be
    # reached
    has_left: bool = False


Decided = tuple[RunMemory, tuple[Decision, ...]]


def after_step(
    state: RunState, limits: Limits, memory: RunMemory, now_s: float, request_id: str
) -> Decided:
    """Return the decisions for a state.

    Lost nodes are determined before it is decided whether to stop. `request_id` is new, for the
    request that may follow.
    """
    losses = _losses(state)
    # The state after these nodes are lost.
    events = [
        Event(node_rank=loss.node_rank, at_s=state.at_s, what=Lost(why=loss.why))
        for loss in losses
    ]
    if events:
        state = fold(state, events)
    decisions: list[Decision] = [*losses]
    late = tuple(node for node in too_late(state) if node not in memory.stopped_late)
    if late:
        memory = replace(memory, stopped_late=memory.stopped_late.union(late))
        decisions.append(StopLate(node_ranks=late))
    memory, asked, reason = _question_and_reason(state, limits, memory, request_id)
    decisions += asked
    if reason and memory.give_up_at_s is None:
        memory, stop = stopped(state, memory, now_s, reason)
        decisions += stop
    elif memory.wants_detach and can_detach(state):
        # Repeated in every step, until an event of the lead confirms it.
        decisions.append(Detach())
    if not memory.has_left and _is_out_of_reach(state, limits):
        memory = replace(memory, has_left=True)
        why = f"no host could be reached for {limits.away_s:g} s; if they are up, the job continues without this notebook"
        decisions.append(Leave(why=why))
    if memory.give_up_at_s is not None and state.at_s > memory.give_up_at_s:
        decisions += _lost(answering(state), "it did not confirm its end")
    return memory, tuple(decisions)


def after_interrupt(
    state: RunState, memory: RunMemory, now_s: float, request_id: str, reason: StopReason = "interrupted"
) -> Decided:  # fmt: skip
    """Return the decisions after an interrupt: stop the run politely, or at once if it is already
    stopping. A detached job runs on.

    `reason` is "terminated" for SIGTERM. If the run has long been without progress, its ranks are
    asked for their stacks first.
    """
    if state.detached_by:
        return replace(memory, has_left=True), ()
    if is_worth_asking(state, memory.inquiry):
        inquiry = begun_inquiry(state, reason, request_id)
        return _inquired(memory, inquiry)
    return stopped(state, memory, now_s, reason)


def is_left(state: RunState, memory: RunMemory) -> bool:
    """Whether the job runs on and this notebook no longer follows it."""
    return memory.has_left or (memory.wants_detach and bool(state.detached_by))


def _losses(state: RunState) -> list[Lose]:
    """Return the nodes to mark as lost now, in the middle of the run."""
    away = overdue(state)
    missed = tuple(node for node in missed_by_peers(state) if node not in away)
    why = f"it could not be reached for {NODE_LOST_S:g} s"
    return _lost(away, why) + _lost(missed, UNHEARD)


def _lost(node_ranks: tuple[int, ...], why: str) -> list[Lose]:
    return [Lose(node_rank=node, why=why) for node in node_ranks]


def _question_and_reason(
    state: RunState, limits: Limits, memory: RunMemory, request_id: str
) -> tuple[RunMemory, tuple[Decision, ...], StopReason | Literal[""]]:
    """Return requests for ranks without progress, and the reason to stop the run now; "" for
    none.
    """
    reason = reason_to_stop(state, limits.timeout_s, detach=memory.wants_detach)
    if reason not in ("", "timeout"):
        return memory, (), reason
    inquiry = memory.inquiry
    if reason and limits.timeout_s is not None:
        inquiry = timeout_inquiry(state, inquiry, limits.timeout_s, request_id)
    else:
        inquiry = hang_inquiry(state, inquiry, limits.hang_timeout_s, request_id)
    memory, asked = _inquired(memory, inquiry)
    if inquiry.reason:
        return memory, asked, reason_after_inquiry(state, inquiry)
    how = "" if reason else look(state, memory.looked_at_s)
    if how:
        memory = replace(memory, looked_at_s=state.at_s)
        asked = (AskForStacks(request_id=request_id, quietly=how == "quiet"),)
    return memory, asked, reason


def _inquired(memory: RunMemory, inquiry: Inquiry) -> Decided:
    """Return the decisions of an inquiry; a new inquiry asks all ranks for their stacks."""
    is_new = inquiry.request_id not in ("", memory.inquiry.request_id)
    asked = AskForStacks(request_id=inquiry.request_id)
    return replace(memory, inquiry=inquiry), (asked,) if is_new else ()


def stopped(
    state: RunState, memory: RunMemory, now_s: float, reason: StopReason
) -> Decided:
    """Return the decisions that stop the run; a detached job stops, too.

    Ranks get a grace time, unless the run is already stopping.
    """
    grace_s = state.terms.grace_s if reason in POLITE_REASONS else GRACE_S
    if memory.give_up_at_s is not None:
        grace_s = 0.0
    memory = replace(memory, give_up_at_s=now_s + grace_s + CONFIRM_S)
    stop = Stop(node_ranks=answering(state), grace_s=grace_s, reason=reason)
    return memory, (stop,)


# ---- whether to stop


def reason_to_stop(
    state: RunState, timeout_s: float | None, *, detach: bool = False
) -> StopReason | Literal[""]:
    """Return the reason to stop the run now, or the reason of the current stop; "" if it runs
    on.
    """
    if state.stopping or state.is_over:
        return state.stopping
    began_s = (state.started_at_s or 0.0) + state.paused_s
    if timeout_s is not None and state.at_s - began_s > timeout_s:
        return "timeout"
    lost = state.lost
    silent = [node.node_rank for node in state.nodes if node.gang == "silent"]
    if detach and not lost.keys() >= set(silent):
        return "gang"
    needs_no_notebook = bool(state.detached_by) or state.terms.goes_on_alone
    # Whether the other hosts receive heartbeats of all nodes that this notebook has lost.
    if state.is_lost and not (
        needs_no_notebook and all(state.nodes[node].is_heard for node in state.lost)
    ):
        return "lost"
    if _is_port_closed(state):
        return "rendezvous"
    return "failed" if _has_failed(state) else ""


def _has_failed(state: RunState) -> bool:
    """Whether a node or a rank has failed without which the job can't continue."""
    if any(node.code not in (None, 0) for node in state.essential):
        return True
    if state.first_failure is not None and not state.terms.may_restart:
        return True
    # Whether a rank has failed and can't be restarted, because all ranks of another node have ended
    # successfully. That node never returns to the rendezvous, but keeps its place there until its
    # torchrun has waited 300 s for the others (torch 2.13: a round ends when it has no participants
    # left, see `_RendezvousState`).
    workers = state.workers.values()
    has_failed = any(worker.phase == "failed" for worker in workers)
    if not has_failed or state.at_s - state.advanced_at_s < RESTART_S:
        return False
    for node in answering(state):
        phases = [worker.phase for worker in workers if worker.node_rank == node]
        if phases and all(phase == "done" for phase in phases):
            return True
    return False


def _is_port_closed(state: RunState) -> bool:
    """Whether nodes that the run needs can't connect to the rendezvous, and have tried long
    enough.
    """
    waiting = [node for node in state.essential if node.node_rank in state.unreached]
    if not waiting:
        return False
    if (
        state.is_elastic
        and len(state.essential) - len(waiting) >= state.terms.min_nodes
    ):
        return False
    if state.endpoint_open_at_s is None:
        return state.at_s - (state.started_at_s or 0.0) > NEVER_OPEN_S
    return state.at_s - state.endpoint_open_at_s > CLOSED_PORT_S


def overdue(state: RunState) -> tuple[int, ...]:
    """Return the nodes whose hosts are down: out of reach for too long while other nodes are
    reachable.

    Time in which this notebook reached no node at all does not count: its own network was down. A
    node whose heartbeats reach the other hosts is not included. A node of a detached job is
    excluded too, even without heartbeats: such a job needs no notebook, and following it must never
    end it.
    """
    there = state.there
    reaches_some = any(node.is_reached for node in there)
    found = []
    for node in there:
        if not node.broken:
            continue
        is_unheard = not node.is_heard and not state.detached_by
        is_down = _is_lead_without_members(state, node) or (reaches_some and is_unheard)
        away_since_s = max(node.broken_at_s, state.reaching_since_s)
        if is_down and state.at_s - away_since_s > NODE_LOST_S:
            found.append(node.node_rank)
    return tuple(found)


def _is_lead_without_members(state: RunState, node: NodeState) -> bool:
    """Whether a node leads an elastic job whose other nodes have all ended because they receive no
    heartbeat of it.

    A single other node may have lost its own network. For a job that is not elastic, see
    `missed_by_peers`.
    """
    if not state.is_elastic or node.node_rank != 0:
        return False
    lost = state.lost
    members = [
        one
        for one in state.nodes[1:]
        if one.stopping == "lost" or one.is_heard or one.node_rank not in lost
    ]
    return bool(members) and all(
        one.stopping == "lost" and one.culprit == 0 for one in members
    )


def missed_by_peers(state: RunState) -> tuple[int, ...]:
    """Return the nodes whose hosts are down: their heartbeats do not reach the others, and no event
    came since.
    """
    return tuple(
        node.node_rank
        for node in state.there
        if node.accused_at_s is not None
        and (node.broken or state.at_s - node.accused_at_s > OWN_WORD_S)
    )


def alive_elsewhere(state: RunState, limits: Limits) -> frozenset[int]:
    """Return the nodes that run even if this notebook can't reach them; while others are followed,
    they are not lost.

    These are nodes whose heartbeats reach the other hosts, and all nodes of a detached job:
    following it must never end it. If no node is reached, the nodes of a job that runs on without
    this notebook are not lost either, and the job is left.
    """
    there = state.there
    found = []
    if _goes_on_unseen(state, limits):
        found = [node for node in there if node.was_met or node.is_heard]
    elif not state.stopping and any(node.is_reached for node in there):
        found = [node for node in there if node.is_heard or state.detached_by]
    return frozenset(node.node_rank for node in found)


def _goes_on_unseen(state: RunState, limits: Limits) -> bool:
    """Whether the job runs on without this notebook, as far as known: no node of it has failed.

    If all ranks of one node have returned, others may still work for long. In an elastic job, a
    member without heartbeats from the others ends, and one that joins too late for a rank fails.
    The rest runs on.
    """
    is_alone = bool(state.detached_by) or state.terms.goes_on_alone
    if limits.away_s is None or not is_alone or state.stopping:
        return False
    if state.is_elastic and state.nodes[0].phase == "gone":
        return False  # the node ends with its lead
    at_work = state.at_work
    for node in state.nodes:
        is_member = state.is_elastic and node.node_rank > 0
        may_go = is_member and (
            node.stopping == "lost" or node.node_rank not in at_work
        )
        if node.phase == "gone" and node.code != 0 and not may_go:
            return False
    return True


def _is_out_of_reach(state: RunState, limits: Limits) -> bool:
    """Whether no node of a job that runs on without this notebook was reached for a long time."""
    met = [node for node in state.there if node.was_met]
    if limits.away_s is None or not met or not _goes_on_unseen(state, limits):
        return False
    if not all(node.broken for node in met):
        return False
    return state.at_s - max(node.broken_at_s for node in met) > limits.away_s


def can_detach(state: RunState) -> bool:
    """Whether every rank has started and the nodes exchange heartbeats, so that the job can run
    unattended.
    """
    lost = state.lost
    there = [node for node in state.nodes if node.node_rank not in lost]
    has_begun = all(node.phase not in ("connecting", "starting") for node in there)
    # A node that another notebook has added, from a host unknown to this one, can't be judged.
    has_unseen = any(state.nodes[node].is_heard for node in lost)
    if not has_unseen:
        has_begun = has_begun and len(state.workers) >= state.world_size
    return has_begun and all(node.is_heard for node in there if node.node_rank != 0)


def too_late(state: RunState) -> tuple[int, ...]:
    """Return the nodes that joined an elastic job when it was over: they would wait long for it.

    Unreachable nodes are excluded, because it is not known whether they have ranks.
    """
    lead = state.nodes[0]
    if not state.is_elastic or lead.phase != "gone" or lead.code != 0:
        return ()
    at_work = state.at_work
    return tuple(
        node
        for node in answering(state)
        if node not in at_work and state.nodes[node].is_reached
    )


def answering(state: RunState) -> tuple[int, ...]:
    """Return the nodes that have neither ended ("gone") nor become unreachable for good
    ("lost").
    """
    return tuple(node.node_rank for node in state.there)
