"""Chooses the ranks of a run that are most worth showing: failed, slow, or standing still."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from distmagic.state.model import WorkerState
from distmagic.state.phases import OPENING, NodePhase, RankPhase

Thing = TypeVar("Thing")

UNFOLDED = 64  # rows of ranks when expanded; of more ranks, the most important ones
# The values of the state column. sent: the whole payload. reconnecting: the connection to a living
# rank's host broke. waiting: for devices of the host. "": a row with a count of others. detached,
# last seen: a rank that was alive when this notebook last saw it.
ShownPhase = (
    NodePhase
    | RankPhase
    | Literal["sent", "reconnecting", "waiting", "detached", "last seen", ""]
)
# For ranks; the most important first.
PHASES: tuple[RankPhase | Literal["reconnecting", "detached", "last seen"], ...] = (
    "failed",
    "lost",
    "reconnecting",
    "stopped",
    "starting",
    "running",
    "detached",
    "last seen",
    "done",
)
_PICKED = 8  # failed ranks, and as many slow ones, with their own row in a large run
_SLOW = 0.9  # a rank with fewer steps than this fraction of the median is slow,
# if it needs more than this to catch up; ranks don't start at the same moment
_LATE_S = 3.0


def slow_ranks(workers: Sequence[WorkerState]) -> set[int]:
    """Return the running ranks that are clearly behind the median: in steps, and in time at their
    own rate.

    When all have succeeded, return those that ended late.
    """
    if all(w.phase == "done" for w in workers):
        return _late_ranks(workers)
    done = {}
    what = set()  # is counted
    for w in workers:
        steps, _ = w.progress
        if w.phase in ("running", "done") and steps is not None:
            done[w.rank] = steps
            of_bar = (w.bars_before, w.bars[0].unit) if w.bars else (0, "")
            what.add(None if w.step is not None else of_bar)
    if len(done) < 2 or len(what) > 1:  # no rank to compare with
        return set()
    median_steps = statistics.median_high(done.values())
    median_rate = statistics.median([w.rate for w in workers if w.rate] or [0.0])
    slow = set()
    for w in workers:
        is_slow = w.rank in done and done[w.rank] < _SLOW * median_steps
        if is_slow and w.phase == "running":
            steps_behind = median_steps - done[w.rank]
            if steps_behind > max(1.0, _LATE_S * (w.rate or median_rate)):
                slow.add(w.rank)
    return slow


def _late_ranks(workers: Sequence[WorkerState]) -> set[int]:
    """Return the ranks that ended clearly later than the median, and took longer for each step."""
    step_s = {w.rank: w.at_s / w.progress[0] for w in workers if w.progress[0]}
    counted = [w for w in workers if w.rank in step_s]
    if not counted:
        return set()
    usual_s = statistics.median_low(step_s.values())
    end_s = statistics.median_low(w.at_s for w in counted) + _LATE_S
    return {
        w.rank for w in counted if w.at_s > end_s and usual_s < _SLOW * step_s[w.rank]
    }


def picked_ranks(
    workers: Sequence[WorkerState], slow: set[int], still: Mapping[int, float]
) -> list[WorkerState]:
    """Return the ranks of a large run with their own rows: failed ones, then those with the fewest
    steps.

    At least two of the latter are shown, more if more ranks are slow or stand still. A rank that
    reports no steps is included when others have ended. For a successful run these are the slow
    ones.
    """
    failed = [w for w in workers if w.phase in ("failed", "lost")]
    some_are_done = any(w.phase == "done" for w in workers)
    running = [w for w in workers if w.phase == "running" and (some_are_done or w.progress[0] is not None)]  # fmt: skip
    running.sort(key=lambda w: w.progress[0] or 0.0)
    count = max(_PICKED // 4, min(_PICKED, len(slow | still.keys())))
    late = [w for w in workers if w.phase == "done" and w.rank in slow]
    late.sort(key=lambda w: -w.at_s)
    return failed[:_PICKED] + running[:count] + late[:_PICKED]


def most_urgent(
    things: Sequence[Thing], order: Callable[[Thing], Any], room: int
) -> list[Thing]:
    """Return at most `room` things, the first ones by `order`, in their original order."""
    by_urgency = sorted(range(len(things)), key=lambda index: order(things[index]))
    return [things[index] for index in sorted(by_urgency[: max(0, room)])]


def urgency(phase: ShownPhase) -> int:
    """Return the priority of showing a phase; 0 is first.

    A host without ranks yet counts as one whose ranks start.
    """
    if phase in (*OPENING, "sent", "waiting"):
        phase = "starting"
    return PHASES.index(phase) if phase in PHASES else len(PHASES)
