"""Detects ranks without progress, and decides when to ask ranks for their stacks before a run is
stopped for that. Pure.

A rank stands still when it has not advanced for ten seconds and for five of its usual steps. That
does not count while a rank waits for the user's input, or for its next cell. Nor does it count for
ranks that have never reported, have done all their steps, or are on an unreachable host.

    RunState           --look-->                              whether to ask ranks for their stacks,
                                                              without a stop
    RunState, Inquiry  --hang_inquiry, timeout_inquiry,
                         begun_inquiry-->                     Inquiry
    Inquiry            --reason_after_inquiry-->              the reason of the stop

decide.py sends the request when an inquiry starts, and stops the run for its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from distmagic.remote.frozen import frozen
from distmagic.remote.wire.vocabulary import StopReason
from distmagic.state.explanation import Explanation
from distmagic.state.hangs import unanswered
from distmagic.state.model import RunState, WorkerState
from distmagic.state.progress import has_shown_progress, is_hung

PATIENCE_S = 10.0
IDLE_S = 1800.0  # unused GPUs are reported after this time
IDLE_SHARE = 0.05  # a GPU with less utilization counts as idle
_USUAL_STEPS = 5
# for a rank whose usual step time is unknown: it may compile, or read its data
_FIRST_STEP_S = 60.0
# After all ranks have stood still for so long, they are asked for their stacks.
LOOK_S = 60.0
# After so long, ask quietly whether ranks wait in different calls; then after twice the time, and
# so on.
GLANCE_S = 10.0
# a run that has stood still for so long is asked for stacks before a stop
WORTH_ASKING_S = 30.0
_LEAST_STILL_S = 5.0  # a short run that reports nothing may simply be working
# Time for the answers; agents themselves wait 4 s for ranks that don't answer.
STACKS_S = 6.0


def still_ranks(state: RunState) -> dict[int, float]:
    """Return the ranks that stand still, each with the seconds since it advanced."""
    if state.phase != "running" or state.paused:
        return {}
    found = {}
    for rank, worker in state.workers.items():
        if not _can_tell(state, worker):
            continue
        limit_s = _USUAL_STEPS / worker.rate if worker.rate else _FIRST_STEP_S
        still_s = state.at_s - max(worker.advanced_at_s, state.resumed_at_s)
        if still_s > max(PATIENCE_S, limit_s):
            found[rank] = still_s
    return found


def idle_hosts(state: RunState) -> dict[str, float]:
    """Return the hosts whose GPUs this run has reserved and not used for long, with the seconds."""
    if state.phase != "running":
        return {}
    found = {node.host: node.gpus_idle_s for node in state.nodes}
    return {host: idle_s for host, idle_s in found.items() if idle_s >= IDLE_S}


def uses_gpus(state: RunState, since_s: float) -> bool:
    """Whether a measurement after `since_s` shows that a GPU of the ranks works.

    Unknown utilization does not count.
    """
    new = {node.node_rank for node in state.nodes if node.looked_at_s > since_s}
    for worker in state.workers.values() if new else ():
        hardware = state.nodes[worker.node_rank].hardware
        if worker.node_rank not in new or hardware is None or worker.gpu is None:
            continue
        for gpu in hardware.gpus[worker.gpu : worker.gpu + 1]:
            if (gpu.utilization or 0.0) >= IDLE_SHARE:
                return True
    return False


def all_still_s(state: RunState, still: Mapping[int, float]) -> float | None:
    """Return the seconds since any rank advanced; None if not all stand still.

    `still` comes from `still_ranks`.
    """
    telling = [worker for worker in _at_work(state) if has_shown_progress(worker)]
    if not telling or any(worker.rank not in still for worker in telling):
        return None
    still_s = state.at_s - state.advanced_at_s  # includes ranks that only print
    return still_s if still_s > PATIENCE_S else None


def look(state: RunState, looked_at_s: float) -> Literal["", "quiet", "full"]:
    """Return whether to ask the ranks for their stacks: "full" asks all of them, "quiet" only in a
    way that interrupts none.

    All are asked once, after standing still for long. A long step is no hang, so the answers to a
    quiet request are shown only if `is_worth_saying`. `looked_at_s` is the time of the last
    request, negative before the first.
    """
    if state.phase != "running" or state.paused or state.stopping:
        return ""
    if not _at_work(state):
        return ""  # no cell runs
    asked_at_s = max([looked_at_s, *(dump.at_s for dump in state.stack_dumps.values())])
    asked_after_s = max(0.0, asked_at_s - state.advanced_at_s)
    still_s = state.at_s - state.advanced_at_s
    if (
        still_s >= LOOK_S > asked_after_s
        and all_still_s(state, still_ranks(state)) is not None
    ):
        return "full"
    if len(state.running) < 2 or any(node.broken for node in state.nodes):
        return ""  # no other rank to wait for, or not all can be asked
    return "quiet" if still_s >= max(GLANCE_S, 2 * asked_after_s) else ""


def is_worth_saying(state: RunState, found: Explanation) -> bool:
    """Whether to show where the ranks are before the run counts as hung: they wait in different
    calls, or for each other.

    Ranks that wait for others may just be in a long step. That is shown only if it lasts, or if all
    ranks stand still for long.
    """
    all_still = all_still_s(state, still_ranks(state))
    if all_still is not None and all_still >= LOOK_S:
        return True
    parted = found.parting
    if parted is None or parted.kind == "together":
        return False
    if parted.kind == "different":
        return True
    return all_still is not None or parted.waits_s >= GLANCE_S


def _at_work(state: RunState) -> list[WorkerState]:
    """Return the running ranks, without those that wait for their next cell."""
    return [one for one in state.running if not one.is_idle]


def _can_tell(state: RunState, worker: WorkerState) -> bool:
    if (
        worker.phase != "running"
        or worker.is_idle
        or not has_shown_progress(worker)
        or state.nodes[worker.node_rank].broken
    ):
        return False
    if worker.step is None and worker.bars and worker.bars[0].closed:
        return False  # code after a bar may show nothing
    done, total = worker.progress
    return done is None or total is None or done < total


# ---- where the ranks are, before a stop


@frozen
class Inquiry:
    """A request to all ranks for their stacks, before a stop."""

    reason: StopReason | Literal[""] = ""  # of the stop; "" if no request was sent
    request_id: str = ""  # the ID in the answers
    until_s: float = 0.0  # the stop waits for the answers until then


def hang_inquiry(
    state: RunState, inquiry: Inquiry, hang_timeout_s: float | None, request_id: str
) -> Inquiry:
    """Return the updated inquiry of a hang: it starts as soon as no rank advances, and is dropped
    when one advances again.

    An inquiry because of an interrupt continues. `request_id` is that of a new one.
    """
    if inquiry.reason in ("interrupted", "terminated"):
        return inquiry
    if not is_hung(state, hang_timeout_s):
        return Inquiry()
    return inquiry if inquiry.reason else begun_inquiry(state, "hung", request_id)


def timeout_inquiry(
    state: RunState, inquiry: Inquiry, timeout_s: float, request_id: str
) -> Inquiry:
    """Return the inquiry before a stop by --timeout; it asks only if the run has stood still for
    long.

    An inquiry that was started because the run hangs continues with the new reason.
    """
    if inquiry.reason == "hung":
        return replace(inquiry, reason="timeout")
    still_s = min(WORTH_ASKING_S, max(_LEAST_STILL_S, timeout_s / 2))
    if is_worth_asking(state, inquiry, still_s):
        return begun_inquiry(state, "timeout", request_id)
    return inquiry


def is_worth_asking(
    state: RunState, inquiry: Inquiry, still_s: float = WORTH_ASKING_S
) -> bool:
    """Whether to ask all ranks for stacks before a stop: all stood still for `still_s`, and were
    not asked yet.
    """
    if inquiry.reason or state.stopping or state.paused:
        return False
    has_stood_still = state.at_s - state.advanced_at_s > still_s
    return has_stood_still and bool(state.running)


def begun_inquiry(state: RunState, reason: StopReason, request_id: str) -> Inquiry:
    """Return an inquiry that starts now."""
    return Inquiry(reason=reason, request_id=request_id, until_s=state.at_s + STACKS_S)


def reason_after_inquiry(state: RunState, inquiry: Inquiry) -> StopReason | Literal[""]:
    """Return the reason to stop the run, once all ranks have answered or their time is over; ""
    before that.
    """
    if not inquiry.reason or state.stopping or state.is_over:
        return ""
    has_answers = not unanswered(state, state.stack_dumps.get(inquiry.request_id))
    return inquiry.reason if has_answers or state.at_s > inquiry.until_s else ""
