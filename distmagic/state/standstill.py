"""Says which ranks stand still, and whether all of them do; and asks where they are before a run is stopped for it. Pure.

A rank stands still when it has not advanced for ten seconds and for five of its usual steps. Nothing is said while a
rank waits for somebody to type, nor of ranks that have never reported anything, have done all their steps, or are on a host that can't be reached just now.

    RunState           --look-->  whether to ask the ranks where they are, with no stop in mind
    RunState, Inquiry  --hang_inquiry, timeout_inquiry, begun_inquiry-->  Inquiry  --reason_after_inquiry-->  why to stop

decide.py asks the ranks when an inquiry has begun, and stops the run for its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from distmagic.remote.wire.vocabulary import StopReason
from distmagic.state.hangs import (
    Explanation,
    dump_of,
    has_shown_progress,
    is_hung,
    unanswered,
)
from distmagic.state.model import RunState, WorkerState

PATIENCE_S = 10.0
IDLE_S = 1800.0  # GPUs that a run has not used for so long are worth a word
_USUAL_STEPS = 5
_FIRST_STEP_S = 60.0  # of a rank whose usual step is not known yet: it may compile, or read its data
LOOK_S = 60.0  # all ranks have stood still for this long: time to see where they are
GLANCE_S = 10.0  # for this long: time to see whether they wait in different calls. Then after twice this time, and so on
WORTH_ASKING_S = 30.0  # a stop of a run that has stood still for this long first asks where the ranks are
_LEAST_STILL_S = 5.0  # a run of a few seconds that reports nothing may just be at work
STACKS_S = 6.0  # agents themselves wait 4 s for ranks that don't answer


def still_ranks(state: RunState) -> dict[int, float]:
    """Return for how many seconds each rank has stood still, by rank; only of those that do."""
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
    """Return the hosts whose GPUs this run holds and has not used for long, with the seconds."""
    if state.phase != "running":
        return {}
    found = {node.host: node.gpus_idle_s for node in state.nodes}
    return {host: idle_s for host, idle_s in found.items() if idle_s >= IDLE_S}


def all_still_s(state: RunState, still: Mapping[int, float]) -> float | None:
    """Return for how many seconds no rank at all has advanced; None where one does. `still` is of `still_ranks`."""
    running = [worker for worker in state.workers.values() if worker.phase == "running"]
    telling = [worker for worker in running if has_shown_progress(worker)]
    if not telling or any(worker.rank not in still for worker in telling):
        return None
    still_s = state.at_s - state.advanced_at_s  # ranks that only print count, too
    return still_s if still_s > PATIENCE_S else None


def look(state: RunState, looked_at_s: float) -> Literal["", "quiet", "full"]:
    """Return whether to ask the ranks where they are: all of them, or in a way that disturbs none.

    All are asked once, where they stand still for long. A long step is no hang, so what a quiet question finds is said
    only if `is_worth_saying`. `looked_at_s` is when they were asked last, negative before that.
    """
    if state.phase != "running" or state.paused or state.stopping:
        return ""
    asked_at_s = max([looked_at_s, *(dump.at_s for dump in state.stack_dumps)])
    asked_after_s = max(0.0, asked_at_s - state.advanced_at_s)
    still_s = state.at_s - state.advanced_at_s
    if (
        still_s >= LOOK_S > asked_after_s
        and all_still_s(state, still_ranks(state)) is not None
    ):
        return "full"
    running = [one for one in state.workers.values() if one.phase == "running"]
    if len(running) < 2 or any(node.broken for node in state.nodes):
        return ""  # nobody to wait for, or not all can be asked
    return "quiet" if still_s >= max(GLANCE_S, 2 * asked_after_s) else ""


def is_worth_saying(state: RunState, found: Explanation) -> bool:
    """Whether to say where the ranks are before the run is called hung: they wait in different calls, or for one another.

    That some wait for others may be a long step; it is said where that lasts, or where all ranks stand still for long.
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


def _can_tell(state: RunState, worker: WorkerState) -> bool:
    if (
        worker.phase != "running"
        or not has_shown_progress(worker)
        or state.nodes[worker.node_rank].broken
    ):
        return False
    if worker.step is None and worker.bars and worker.bars[0].closed:
        return False  # what comes after a bar may show nothing
    done, total = worker.progress
    return done is None or total is None or done < total


# ---- where the ranks are, before a stop


@dataclass(frozen=True, kw_only=True)
class Inquiry:
    """The question to all ranks where they are, before a stop for `reason`; "" while nothing was asked.

    `request_id` names the question in the answers; after `until_s` the stop waits for them no longer.
    """

    reason: StopReason | Literal[""] = ""
    request_id: str = ""
    until_s: float = 0.0


def hang_inquiry(
    state: RunState, inquiry: Inquiry, hang_timeout_s: float | None, new_id: Callable[[], str]
) -> Inquiry:  # fmt: skip
    """Return the inquiry after one more look: it begins as soon as no rank advances, and is dropped when one does again.

    An inquiry because of an interrupt goes on. `new_id` makes the name of the request.
    """
    if inquiry.reason in ("interrupted", "terminated"):
        return inquiry
    if not is_hung(state, hang_timeout_s):
        return Inquiry()
    return inquiry if inquiry.reason else begun_inquiry(state, "hung", new_id())


def timeout_inquiry(
    state: RunState, inquiry: Inquiry, timeout_s: float, new_id: Callable[[], str]
) -> Inquiry:
    """Return the inquiry before a stop because of --timeout; there is none where the run has not stood still for long.

    One that has begun because the run hangs goes on for this reason.
    """
    if inquiry.reason == "hung":
        return replace(inquiry, reason="timeout")
    still_s = min(WORTH_ASKING_S, max(_LEAST_STILL_S, timeout_s / 2))
    if is_worth_asking(state, inquiry, still_s):
        return begun_inquiry(state, "timeout", new_id())
    return inquiry


def is_worth_asking(
    state: RunState, inquiry: Inquiry, still_s: float = WORTH_ASKING_S
) -> bool:
    """Whether a stop first asks all ranks where they are: the run has stood still for `still_s`, and they were not asked yet."""
    if inquiry.reason or state.stopping or state.paused:
        return False
    has_stood_still = state.at_s - state.advanced_at_s > still_s
    return has_stood_still and any(
        worker.phase == "running" for worker in state.workers.values()
    )


def begun_inquiry(state: RunState, reason: StopReason, request_id: str) -> Inquiry:
    """Return the inquiry that begins now."""
    return Inquiry(reason=reason, request_id=request_id, until_s=state.at_s + STACKS_S)


def reason_after_inquiry(state: RunState, inquiry: Inquiry) -> StopReason | Literal[""]:
    """Return why the run must be stopped now that all ranks have answered, or had the time; "" before that."""
    if not inquiry.reason or state.stopping or state.is_over:
        return ""
    has_answers = not unanswered(state, dump_of(state, inquiry.request_id))
    return inquiry.reason if has_answers or state.at_s > inquiry.until_s else ""
