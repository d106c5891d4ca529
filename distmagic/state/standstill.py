"""Says which ranks stand still, and whether all of them do. Pure.

A rank stands still when it has not advanced for ten seconds and for five of its usual steps. Nothing is said of ranks
that have never reported anything, have done all their steps, or are on a host that can't be reached just now.
"""

from __future__ import annotations

from collections.abc import Mapping

from distmagic.state.hangs import has_shown_progress
from distmagic.state.model import RunState, WorkerState

PATIENCE_S = 10.0
_USUAL_STEPS = 5
_FIRST_STEP_S = 60.0  # of a rank whose usual step is not known yet: it may compile, or read its data
LOOK_S = 60.0  # all ranks have stood still for this long: time to see where they are


def still_ranks(state: RunState) -> dict[int, float]:
    """Return for how many seconds each rank has stood still, by rank; only of those that do."""
    if state.phase != "running":
        return {}
    found = {}
    for rank, worker in state.workers.items():
        if not _can_tell(state, worker):
            continue
        limit_s = _USUAL_STEPS / worker.rate if worker.rate else _FIRST_STEP_S
        still_s = state.at_s - worker.advanced_at_s
        if still_s > max(PATIENCE_S, limit_s):
            found[rank] = still_s
    return found


def all_still_s(state: RunState, still: Mapping[int, float]) -> float | None:
    """Return for how many seconds no rank at all has advanced; None where one does. `still` is of `still_ranks`."""
    running = [worker for worker in state.workers.values() if worker.phase == "running"]
    telling = [worker for worker in running if has_shown_progress(worker)]
    if not telling or any(worker.rank not in still for worker in telling):
        return None
    still_s = state.at_s - state.advanced_at_s  # ranks that only print count, too
    return still_s if still_s > PATIENCE_S else None


def is_worth_a_look(state: RunState, looked_at_s: float) -> bool:
    """Whether to ask all ranks where they are: all stand still for long, and nobody has asked since they do.

    `looked_at_s` is when they were asked last, negative before that.
    """
    if looked_at_s >= state.advanced_at_s:
        return False
    if state.stack_dumps and state.stack_dumps[-1].at_s >= state.advanced_at_s:
        return False
    if state.at_s - state.advanced_at_s < LOOK_S:
        return False
    return all_still_s(state, still_ranks(state)) is not None


def _can_tell(state: RunState, worker: WorkerState) -> bool:
    if (
        worker.phase != "running"
        or not has_shown_progress(worker)
        or state.nodes[worker.node_rank].broken
    ):
        return False
    done, total = worker.progress
    return done is None or total is None or done < total
