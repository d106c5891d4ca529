"""What to do about a run, as its state stands. Pure: the run loop carries out what comes out, in this order.

    RunState, Limits, RunMemory  --after_step, after_interrupt, after_stop_click-->  RunMemory, Decisions

`after_step` is asked in every step of the loop, the others when the user wants the run to end. `RunMemory` is what was
decided before. A decision to lose nodes is folded here, too, so that the next ones are made without them.

A run is stopped for one reason: the first that `reason_to_stop` or `reason_after_inquiry` gives, or an interrupt of the
user. Before a run that stands still is stopped, its ranks are asked where they are; `Inquiry` remembers that question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

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
CLOSED_PORT_S = (
    5.0  # the endpoint is open for this long, and a node still can't dial it
)
NEVER_OPEN_S = 120.0  # the endpoint has not opened at all; importing torch can take long on a slow disk
NODE_LOST_S = 10.0  # a host that only this notebook can't reach is lost after this long; if it is all, the lease counts
OWN_WORD_S = (
    1.5  # for a host that the others don't hear to say that it doesn't hear them
)
# After the last sign of life, for torchrun to start a failed rank again where the other nodes seem to have ended.
RESTART_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a run is ended at: its whole time since it was started, and the time in which no rank advances.

    Neither passes while a rank waits for somebody to type.

    After `away_s` in which no node of it was reached, a job that goes on without this notebook is left to itself.
    """

    timeout_s: float | None = None
    hang_timeout_s: float | None = None
    away_s: float | None = None


# ---- decisions


@dataclass(frozen=True, kw_only=True)
class Lose:
    """Count nodes as lost."""

    node_ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop the run, on these nodes: all that can hear of it."""

    node_ranks: tuple[int, ...]
    grace_s: float
    reason: StopReason


@dataclass(frozen=True, kw_only=True)
class StopLate:
    """Stop nodes that came too late, while the run ends well."""

    node_ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AskForStacks:
    """Ask all ranks where they are. `quietly`: only those that are not disturbed by it."""

    request_id: str
    quietly: bool = False


@dataclass(frozen=True, kw_only=True)
class Detach:
    """Have the lead let the job live without this notebook."""


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Follow the job no longer: it goes on alone."""

    why: str


Decision = Lose | Stop | StopLate | AskForStacks | Detach | Leave


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """What was decided before, and what the user wishes.

    `give_up_at_s` is when nodes that have not confirmed their end are lost, None while the run is not stopped.
    `looked_at_s` is when the ranks of a run that stands still were asked where they are, with no stop in mind.
    `stopped_late` are the nodes of `StopLate`. `wants_detach`: the job is to go on alone as soon as it can. `has_left`:
    a job that goes on alone is followed no longer, because the user wished so or no host of it could be reached.
    """

    inquiry: Inquiry = field(default_factory=Inquiry)
    looked_at_s: float = -1.0
    give_up_at_s: float | None = None
    stopped_late: frozenset[int] = frozenset()
    wants_detach: bool = False
    has_left: bool = False


Decided = tuple[RunMemory, tuple[Decision, ...]]


def after_step(
    state: RunState, limits: Limits, memory: RunMemory, now_s: float, new_id: Callable[[], str]
) -> Decided:  # fmt: skip
    """Decide what the state asks for. Lost nodes are known before it is decided whether to stop.

    `new_id` makes the name of a request.
    """
    losses = _losses(state)
    # The state when these nodes are lost.
    events = []
    for loss in losses:
        for node in loss.node_ranks:
            events.append(
                Event(node_rank=node, at_s=state.at_s, what=Lost(why=loss.why))
            )
    state = fold(state, events) if events else state
    decisions: list[Decision] = [*losses]
    late = tuple(node for node in too_late(state) if node not in memory.stopped_late)
    if late:
        memory = replace(memory, stopped_late=memory.stopped_late.union(late))
        decisions.append(StopLate(node_ranks=late))
    memory, asked, reason = _question_and_reason(state, limits, memory, new_id)
    decisions += asked
    if reason and memory.give_up_at_s is None:
        memory, stop = _stopped(state, memory, now_s, reason)
        decisions += stop
    elif memory.wants_detach and can_detach(state):
        # In every step, until the lead's event says that it is so.
        decisions.append(Detach())
    if not memory.has_left and _is_out_of_reach(state, limits):
        memory = replace(memory, has_left=True)
        why = f"no host could be reached for {limits.away_s:g} s; if they are up, the job continues without this notebook"
        decisions.append(Leave(why=why))
    if memory.give_up_at_s is not None and state.at_s > memory.give_up_at_s:
        decisions += _lost(answering(state), "it did not confirm its end")
    return memory, tuple(decisions)


def after_interrupt(
    state: RunState, memory: RunMemory, now_s: float, new_id: Callable[[], str], reason: StopReason = "interrupted"
) -> Decided:  # fmt: skip
    """Decide to stop the run politely; at once where it is being stopped already. A detached job goes on.

    `reason` is "terminated" for SIGTERM. Where a run has stood still for long, its ranks are asked where they are before.
    """
    if state.detached_by:
        return replace(memory, has_left=True), ()
    if is_worth_asking(state, memory.inquiry):
        inquiry = begun_inquiry(state, reason, new_id())
        return _inquired(memory, inquiry)
    return _stopped(state, memory, now_s, reason)


def after_stop_click(state: RunState, memory: RunMemory, now_s: float) -> Decided:
    """Decide to stop the run politely, a detached one too; at once where it is being stopped already."""
    return _stopped(state, memory, now_s, "interrupted")


def is_left(state: RunState, memory: RunMemory) -> bool:
    """Whether the job goes on alone, and nobody here follows it any more."""
    return memory.has_left or (memory.wants_detach and bool(state.detached_by))


def _losses(state: RunState) -> tuple[Lose, ...]:
    """Return the nodes that are lost from now on, in the middle of the run."""
    away = overdue(state)
    missed = tuple(node for node in missed_by_peers(state) if node not in away)
    why = f"it could not be reached for {NODE_LOST_S:g} s"
    return (*_lost(away, why), *_lost(missed, UNHEARD))


def _lost(node_ranks: tuple[int, ...], why: str) -> tuple[Lose, ...]:
    return (Lose(node_ranks=node_ranks, why=why),) if node_ranks else ()


def _question_and_reason(
    state: RunState, limits: Limits, memory: RunMemory, new_id: Callable[[], str]
) -> tuple[RunMemory, tuple[Decision, ...], StopReason | Literal[""]]:
    """Return what to ask of ranks that stand still, and why the run is to be stopped now, "" if it is not."""
    reason = reason_to_stop(state, limits.timeout_s, detach=memory.wants_detach)
    if reason not in ("", "timeout"):
        return memory, (), reason
    inquiry = memory.inquiry
    if reason and limits.timeout_s is not None:
        inquiry = timeout_inquiry(state, inquiry, limits.timeout_s, new_id)
    else:
        inquiry = hang_inquiry(state, inquiry, limits.hang_timeout_s, new_id)
    memory, asked = _inquired(memory, inquiry)
    if inquiry.reason:
        return memory, asked, reason_after_inquiry(state, inquiry)
    how = "" if reason else look(state, memory.looked_at_s)
    if how:
        memory = replace(memory, looked_at_s=state.at_s)
        asked = (*asked, AskForStacks(request_id=new_id(), quietly=how == "quiet"))
    return memory, asked, reason


def _inquired(memory: RunMemory, inquiry: Inquiry) -> Decided:
    """Go on with an inquiry; one that has just begun asks all ranks where they are."""
    is_new = inquiry.request_id not in ("", memory.inquiry.request_id)
    asked = AskForStacks(request_id=inquiry.request_id)
    return replace(memory, inquiry=inquiry), (asked,) if is_new else ()


def _stopped(
    state: RunState, memory: RunMemory, now_s: float, reason: StopReason
) -> Decided:
    """Stop the run: with some time for its ranks where it is not being stopped yet, else at once."""
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
    """Return why the run must be stopped now, or why it is being stopped; "" if it goes on."""
    if state.stopping or state.is_over:
        return state.stopping
    began_s = (state.started_at_s or 0.0) + state.paused_s
    if timeout_s is not None and state.at_s - began_s > timeout_s:
        return "timeout"
    lost = state.lost_nodes
    silent = [node.node_rank for node in state.nodes if node.gang == "silent"]
    if detach and not lost.issuperset(silent):
        return "gang"
    needs_no_notebook = bool(state.detached_by) or state.terms.goes_on_alone
    # Whether the gang hears all nodes that are lost to this notebook.
    if state.is_lost and not (
        needs_no_notebook
        and all(state.nodes[node].is_heard for node in state.lost_nodes)
    ):
        return "lost"
    if _is_port_closed(state):
        return "rendezvous"
    return "failed" if _has_failed(state) else ""


def _has_failed(state: RunState) -> bool:
    """Whether a node or a rank has failed, and the job can't go on without it."""
    if any(node.code not in (None, 0) for node in state.essential):
        return True
    if state.first_failure is not None and not state.terms.max_restarts:
        return True
    # Whether a rank has failed and can't be started again, because all ranks of another node have ended well.
    # That node never comes back to the rendezvous, and holds its place there until its torchrun has waited 300 s for the
    # others to end (torch 2.13: a round is over when no participant is left in it, see `_RendezvousState`).
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
    """Whether nodes that the run needs can't dial the rendezvous, and have tried for long enough."""
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
    """Return the nodes that have been out of reach for too long while others are not: their hosts are down.

    While this notebook reached no node at all, its own network was down: that time does not count.

    A node that its own gang hears is not among them, even if this notebook can't reach it. Nor is one of a detached
    job, which needs no notebook, also where its nodes can't hear each other: following it must never end it.
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
    """Whether a node is the lead of an elastic job whose other nodes have all ended because they don't hear it.

    One of them alone may have lost its own network. In a job that is not elastic the lead is accused: `missed_by_peers`.
    """
    if not state.is_elastic or node.node_rank != 0:
        return False
    lost = state.lost_nodes
    members = [
        one
        for one in state.nodes[1:]
        if one.stopping == "lost" or one.is_heard or one.node_rank not in lost
    ]
    return bool(members) and all(
        one.stopping == "lost" and one.culprit == 0 for one in members
    )


def missed_by_peers(state: RunState) -> tuple[int, ...]:
    """Return the nodes that their gang misses and that have not said a word themselves since: their hosts are down."""
    found = []
    for node in state.there:
        accused_at_s = node.accused_at_s
        if accused_at_s is None:
            continue
        if node.broken or state.at_s - accused_at_s > OWN_WORD_S:
            found.append(node.node_rank)
    return tuple(found)


def alive_elsewhere(state: RunState, limits: Limits) -> frozenset[int]:
    """Return the nodes that run although this notebook may not reach them; while others are followed, they are not lost.

    The gang hears a node that has joined it, and a detached job needs no notebook: following it must never end it. So
    where no node is reached, those of a job that goes on without this notebook are not lost either; it is left.
    """
    there = state.there
    if state.stopping:
        found = []
    elif _goes_on_unseen(state, limits):
        found = [node for node in there if node.was_met or node.is_heard]
    elif any(node.is_reached for node in there):
        found = [node for node in there if node.is_heard or state.detached_by]
    else:
        found = []
    return frozenset(node.node_rank for node in found)


def _goes_on_unseen(state: RunState, limits: Limits) -> bool:
    """Whether the job goes on without this notebook, as far as known: no node of it has failed.

    Where all ranks of a node have returned, others may work for long. In an elastic job a member that does not hear the
    others ends, and one that came too late for a rank fails; they go on.
    """
    is_alone = bool(state.detached_by) or state.terms.goes_on_alone
    if limits.away_s is None or not is_alone or state.stopping:
        return False
    if state.is_elastic and state.nodes[0].phase == "gone":
        return False  # it ends with its lead
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
    """Whether no node of a job that goes on without this notebook was reached for long."""
    met = [node for node in state.there if node.was_met]
    if limits.away_s is None or not met or not _goes_on_unseen(state, limits):
        return False
    if not all(node.broken for node in met):
        return False
    return state.at_s - max(node.broken_at_s for node in met) > limits.away_s


def can_detach(state: RunState) -> bool:
    """Whether every rank has begun, and the nodes hear each other: so that none is left alone without a notebook."""
    lost = state.lost_nodes
    there = [node for node in state.nodes if node.node_rank not in lost]
    has_begun = all(node.phase not in ("connecting", "starting") for node in there)
    # What a node does that another notebook has brought, from a host that is not known here, can't be told.
    has_unseen = any(state.nodes[node].is_heard for node in lost)
    if not has_unseen:
        has_begun = has_begun and len(state.workers) >= state.world_size
    return has_begun and all(node.is_heard for node in there if node.node_rank != 0)


def too_late(state: RunState) -> tuple[int, ...]:
    """Return the nodes that came to an elastic job when it was over: they would wait for it for long.

    Of one that can't be reached it is not known whether it has ranks.
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
    """Return the nodes that are neither gone nor lost."""
    return tuple(node.node_rank for node in state.there)
