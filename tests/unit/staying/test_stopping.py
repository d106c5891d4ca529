"""The stages of an interrupt, and when ranks are out of step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distmagic.remote.wire import protocol as p
from distmagic.state.events import Event
from distmagic.state.fold import begin, fold
from distmagic.staying import out_of_step, stopping
from distmagic.staying.cell_state import CellState, begin_cell, take
from distmagic.staying.stopping import due, next_stage, step_of_all
from tests.builders.events import HOSTS, at, hello, worker

RANKS = (0, 1, 2, 3)


def of_cell() -> CellState:
    events = [hello(0), hello(1)]
    events += [worker(rank, rank // 2, local=rank % 2) for rank in RANKS]
    return begin_cell(fold(begin("j", HOSTS), events), 1, RANKS, began_unix_s=5.0)


def count(rank: int, steps: int = 0, iterations: int = 0, idle_s: float = 0.1, step_s: float = 0.1) -> p.StepCount:  # fmt: skip
    return p.StepCount(
        cell=1,
        rank=rank,
        steps=steps,
        iterations=iterations,
        idle_s=idle_s,
        step_s=step_s,
    )


def counted(state: CellState, *counts: p.StepCount, at_s: float = 1.0) -> CellState:
    return take(state, [at(one, one.rank // 2, at_s) for one in counts])


def later(state: CellState, at_s: float) -> CellState:
    return take(state, [Event(node_rank=0, at_s=at_s, what=None)])


def asked() -> CellState:
    state, [ask] = due(next_stage(of_cell()))
    assert ask == p.ParkAtStep(cell=1, ranks=RANKS)
    assert due(state) == (state, ())
    return state


def test_ranks_report_their_steps_and_stop_after_one_that_none_has_passed():
    state = counted(asked(), *(count(rank, 7 + rank // 3) for rank in RANKS[:3]))
    assert due(state) == (state, ())
    state, [stop] = due(counted(state, count(3, 8)))
    assert stop == p.StopAtStep(cell=1, ranks=RANKS, kind="step", step=9)
    ends = [
        at(
            p.CellEnded(
                cell=1,
                rank=rank,
                ended=p.Ended(rank=rank, restart=0, outcome="signalled", code=-2),
            ),
            rank // 2,
            2.0,
        )
        for rank in RANKS
    ]
    state = take(state, ends)
    assert stopping.stopped_after(state) == "Stopped after step 9 on all ranks."
    assert due(state) == (state, ())


def test_where_no_rank_makes_steps_they_are_interrupted_where_they_are():
    state, [stop] = due(counted(asked(), *map(count, RANKS)))
    assert stop == p.InterruptCell(cell=1, ranks=RANKS)
    assert next_stage(state).stage == "end"


@pytest.mark.parametrize("has_counts", [False, True], ids=["no answer", "no step"])
def test_ranks_that_do_not_come_to_a_step_are_interrupted_where_they_are(has_counts):
    state = asked()
    if has_counts:
        state, _ = due(counted(state, *(count(rank, 7) for rank in RANKS)))
    assert due(later(state, 2.9))[1] == ()
    _, [stop] = due(later(state, 4.5))
    assert stop == p.InterruptCell(cell=1, ranks=RANKS)


def test_ranks_with_long_steps_have_longer():
    counts = [count(rank, 7, step_s=20.0) for rank in RANKS]
    state, _ = due(counted(asked(), *counts))
    assert due(later(state, 40.0))[1] == ()
    assert due(later(state, 42.0))[1] != ()


def test_a_second_interrupt_finds_ranks_where_they_are_and_the_third_is_the_end():
    state, [stop] = due(next_stage(asked()))
    assert isinstance(stop, p.InterruptCell)
    assert next_stage(state).stage == "end"


def test_ranks_that_ignore_an_interrupt_where_they_are_are_stuck():
    state, _ = due(next_stage(asked()))
    assert not stopping.is_stuck(state)
    assert not stopping.is_stuck(later(state, 5.5))
    assert stopping.is_stuck(later(state, 6.5))
    assert not stopping.is_stuck(later(of_cell(), 60.0))


def test_what_counts_as_a_step():
    of = {rank: count(rank, 5, 9) for rank in RANKS}
    assert step_of_all(of) == ("step", 6)
    # Training was before, and this is an evaluation.
    of = {rank: count(rank, 5, 9 + rank, idle_s=60.0) for rank in RANKS}
    assert step_of_all(of) == ("iteration", 13)
    # Only one rank has a bar.
    of[3] = count(3, 5, 0, idle_s=60.0)
    assert step_of_all(of) == ("step", 6)
    assert step_of_all({0: count(0, 0, 1), 1: count(1)}) is None


def ends(*calls: int, **more: object) -> dict[int, p.CellEnded]:
    found = {}
    for rank, number in enumerate(calls):
        group = p.GroupCalls(name="0", size=len(calls), calls=number, last="broadcast")
        found[rank] = p.CellEnded(
            cell=1,
            rank=rank,
            ended=p.Ended(rank=rank, restart=0, outcome="returned"),
            groups=(group,) if number else (),
            **more,
        )
    return found


def test_what_is_said_of_process_groups_after_a_cell(golden):
    model = ("model (DistributedDataParallel)",)
    both = (*model, "mesh (DeviceMesh)")
    first, *_ = ends(5, 4, 4).values()
    golden(
        out_of_step.notice(ends(5, 4, 4)),
        out_of_step.notice(ends(7, 7, 4, holders=model)),
        out_of_step.notice(ends(4, 4, is_broken=True, holders=both)),
        out_of_step.notice(ends(4, 4, 0)),
    )
    assert out_of_step.notice(ends(4, 4)) == ""
    assert out_of_step.notice({}) == ""
    # Two of the four ranks have run a cell so far.
    other = replace(first, rank=1)
    assert out_of_step.notice({0: first, 1: other}) == ""


def test_ranks_that_run_on_are_told_of_those_that_have_ended_the_cell():
    group = p.GroupCalls(name="0", size=4, calls=3)
    made = [p.Ended(rank=rank, restart=0, outcome="returned") for rank in RANKS]
    ends = [
        p.CellEnded(cell=1, rank=0, ended=made[0]),
        *(p.CellEnded(cell=1, rank=rank, ended=made[rank], groups=(group,)) for rank in (1, 2)),
    ]  # fmt: skip
    state = take(of_cell(), [at(one, one.rank // 2, 2.0) for one in ends])
    assert due(later(state, 2.9)) == (later(state, 2.9), ())
    state, told = due(later(state, 3.0))
    assert told == (
        p.OthersEnded(cell=1, ranks=(3,), ended=(0,)),
        p.OthersEnded(cell=1, ranks=(3,), ended=(1, 2), groups=(group,)),
    )
    assert due(later(state, 9.0))[1] == ()
    last = p.CellEnded(cell=1, rank=3, ended=made[3])
    assert due(later(take(state, [at(last, 1, 9.0)]), 20.0))[1] == ()


def test_an_error_after_the_interrupt_is_reported_with_it():
    state = stopping.next_stage(of_cell())
    failure = p.Failure(type="OSError", message="disk full\nmore", traceback="")
    ends = [p.Ended(rank=rank, restart=0, outcome="signalled") for rank in RANKS]
    assert stopping.raised_after(ended(state, ends)) == ""
    ends[2] = p.Ended(rank=2, restart=0, outcome="raised", failure=failure)
    assert stopping.raised_after(ended(state, ends)) == (
        "After the interrupt an error was raised on 2: OSError: disk full"
    )
    assert stopping.raised_after(ended(of_cell(), ends)) == ""


def ended(state: CellState, ends: list[p.Ended]) -> CellState:
    whole = [p.CellEnded(cell=1, rank=one.rank, ended=one) for one in ends]
    return take(state, [at(one, one.rank // 2, 2.0) for one in whole])
