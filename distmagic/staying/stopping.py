"""The stages of the user's interrupts of a cell: stop after a common step, stop at once, end the
ranks. Pure.

    the user interrupts   --next_stage-->  CellState in its next stage
    CellState             --due-->         CellState, and the requests to send to ranks now

If all ranks were interrupted at one moment, some would be in one step and some in the next. That
would leave most models under DistributedDataParallel unusable. So all ranks first report their
steps, and then stop at a step that none has passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distmagic.remote.wire import protocol
from distmagic.remote.wire.clipping import ranges
from distmagic.staying.cell_state import (
    CellState,
    interrupted,
    of_ends,
    peers_to_interrupt,
)

_PATIENCE_S = 3.0  # time for ranks to reach a step
_MOST_PATIENCE_S = 60.0
_STUCK_S = 5.0  # time for an interrupt to end the cell where its ranks are
_AT_A_STEP = (
    "The ranks stop after the same step. A second interrupt stops them where they are."
)
_WHERE_THEY_ARE = "The ranks are interrupted where they are. The next interrupt ends them, and all that they hold is lost."


def next_stage(state: CellState) -> CellState:
    """Return the state after one more interrupt of the user, which begins the next stage."""
    if not state.stage:
        asked = interrupted(state, state.asked, by_user=True)
        until_s = state.run.at_s + _PATIENCE_S
        return replace(asked, stage="ask", until_s=until_s, counts={})
    if state.stage == "where they are":
        return replace(state, stage="end")
    return replace(state, stage="go there")


def due(state: CellState) -> tuple[CellState, tuple[protocol.HandedOn, ...]]:
    """Return the state after the due requests were sent, and these requests: for the user's
    interrupt, after failures, and after other ranks have ended the cell.
    """
    state, asked = _of_the_user(state)
    state, ended = of_ends(state)
    found: tuple[protocol.HandedOn, ...] = (
        *(() if asked is None else (asked,)),
        *ended,
    )
    if peers := peers_to_interrupt(state):
        failed = state.run.first_failure
        state = interrupted(state, peers, by_user=False)
        found += (
            protocol.InterruptCell(
                cell=state.run.cell,
                ranks=peers,
                failed=-1 if failed is None else failed,
            ),
        )
    return state, found


def _of_the_user(state: CellState) -> tuple[CellState, protocol.HandedOn | None]:
    run = state.run
    ranks = state.at_work
    if run.is_over or not ranks:
        return state, None
    if state.stage == "ask":
        return replace(state, stage="asked"), protocol.ParkAtStep(cell=run.cell, ranks=ranks)  # fmt: skip
    if state.stage == "asked" and all(rank in state.counts for rank in ranks):
        counts = {rank: state.counts[rank] for rank in ranks}
        agreed = step_of_all(counts)
        if agreed is None:
            return _where_they_are(state)
        kind, step = agreed
        slowest_s = max(one.step_s for one in counts.values())
        until_s = run.at_s + min(max(_PATIENCE_S, 2 * slowest_s), _MOST_PATIENCE_S)
        stop = protocol.StopAtStep(cell=run.cell, ranks=ranks, kind=kind, step=step)
        state = interrupted(state, state.asked, by_user=True, notice=_AT_A_STEP)
        return replace(state, stage="stopping", until_s=until_s, stop=stop), stop
    is_late = state.stage in ("asked", "stopping") and run.at_s > state.until_s
    if state.stage == "go there" or is_late:
        return _where_they_are(state)
    return state, None


def _where_they_are(state: CellState) -> tuple[CellState, protocol.HandedOn]:
    ranks = state.at_work
    there = interrupted(state, ranks, by_user=True, notice=_WHERE_THEY_ARE)
    until_s = state.run.at_s + _STUCK_S
    there = replace(there, stage="where they are", until_s=until_s)
    return there, protocol.InterruptCell(cell=state.run.cell, ranks=ranks)


def is_stuck(state: CellState) -> bool:
    """Whether ranks still run a cell some time after they were interrupted where they are: C code
    ignores that.
    """
    is_late = state.stage == "where they are" and state.run.at_s > state.until_s
    return is_late and bool(state.at_work)


def step_of_all(
    counts: Mapping[int, protocol.StepCount],
) -> tuple[str, int] | None:
    """Return "step" or "iteration", and the next number that no rank has passed; None if ranks
    count neither.

    A rank that was asked passes at most one step after its count. Optimizer steps count as long as
    ranks still make them.
    """
    stepping = [one for one in counts.values() if one.steps]
    iterates = all(one.iterations for one in counts.values())
    if stepping:
        idle_s = min(one.idle_s for one in stepping)
        step_s = max(one.step_s for one in stepping)
        if not iterates or idle_s <= max(_PATIENCE_S, 2 * step_s):
            return "step", max(one.steps for one in stepping) + 1
    if iterates:
        return "iteration", max(one.iterations for one in counts.values()) + 1
    return None


def stopped_after(state: CellState) -> str:
    """Return a sentence with the step after which all ranks stopped; "" if they did not stop that
    way.
    """
    if state.stage != "stopping" or state.stop is None or not state.run.is_over:
        return ""
    if any(end.ended.outcome != "signalled" for end in state.ends.values()):
        return ""
    return f"Stopped after {state.stop.kind} {state.stop.step:,} on all ranks."


def raised_after(state: CellState) -> str:
    """Return a sentence with the error that ranks raised after the user's interrupt, such as in a
    `finally`; "" if none has.
    """
    if state.run.stopping != "interrupted":
        return ""
    failures = {
        rank: end.ended.failure for rank, end in state.ends.items() if end.ended.failure
    }
    for failure in failures.values():
        ranks = ",".join(ranges(sorted(failures)))
        what = f"{failure.type}: {failure.message}".partition("\n")[0].removesuffix(
            ": "
        )
        return f"After the interrupt an error was raised on {ranks}: {what}"
    return ""
