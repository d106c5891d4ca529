"""Which ranks stand still, and when all are asked where they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distmagic.failures.calls import Parting, Side
from distmagic.remote.wire import protocol as p
from distmagic.state.decide import reason_to_stop
from distmagic.state.events import Broken, Event, Lost
from distmagic.state.explanation import Explanation
from distmagic.state.fold import fold
from distmagic.state.model import RunState
from distmagic.state.progress import is_hung
from distmagic.state.standstill import (
    Inquiry,
    all_still_s,
    is_worth_asking,
    is_worth_saying,
    look,
    still_ranks,
)
from tests.builders.events import at, begun, output, progress


def steps(rank: int, node: int, count: int, every_s: float = 1.0) -> list[Event]:
    """Return the reports of a rank that makes a step every so many seconds."""
    found = []
    for step in range(1, count + 1):
        event = progress(rank, node, at_s=step * every_s, step=float(step), total=100.0)
        found.append(replace(event, at_s=step * every_s))
    return found


def later(state: RunState, at_s: float, *events: Event) -> RunState:
    return fold(
        state, [*(replace(event, at_s=at_s) for event in events), at(None, at_s=at_s)]
    )


def training(every_s: float = 1.0) -> RunState:
    """Return a run whose four ranks have made ten steps each."""
    events = [
        event for rank in range(4) for event in steps(rank, rank // 2, 10, every_s)
    ]
    return begun(*sorted(events, key=lambda event: event.at_s))


@pytest.mark.parametrize(
    ("every_s", "after_s", "is_still"),
    [(1.0, 9.0, False), (1.0, 10.5, True), (5.0, 20.0, False), (5.0, 25.5, True)],
)
def test_a_rank_stands_still_after_ten_seconds_and_five_of_its_steps(
    every_s, after_s, is_still
):
    state = later(training(every_s), 10 * every_s + after_s)
    expected = dict.fromkeys(range(4), after_s) if is_still else {}
    assert still_ranks(state) == pytest.approx(expected)


def test_a_rank_that_goes_on_stands_still_no_more():
    state = later(training(), 40.0, progress(2, 1, at_s=40.0, step=11.0))
    assert set(still_ranks(state)) == {0, 1, 3}
    assert all_still_s(state, still_ranks(state)) is None


def test_all_stand_still():
    state = later(training(), 54.0)
    assert all_still_s(state, still_ranks(state)) == 44.0


def test_nothing_is_said_of_ranks_that_can_not_stand_still():
    """Of one that is done with its steps, that never reported, that has ended, or whose host can't be reached."""
    silent = begun(*steps(0, 0, 10))
    assert set(still_ranks(later(silent, 99.0))) == {0}
    assert still_ranks(later(begun(*steps(0, 0, 100)), 200.0)) == {}
    assert (
        still_ranks(
            later(training(), 99.0, at(Broken(why="cut"), 0), at(Broken(why="cut"), 1))
        )
        == {}
    )
    stopped = [at(p.EngineEnded(code=1), node) for node in (0, 1)]
    assert set(still_ranks(later(training(), 99.0, *stopped))) <= {0, 1, 2, 3}


def test_what_a_rank_only_prints_may_come_as_seldom_as_it_likes():
    """It prints its loss once an epoch. Any line is a sign of life, and nothing is said of one that is late."""
    row = p.MetricRow(at_s=1.0, step=1.0, metrics={"loss": 0.5})
    state = begun(progress(0, at_s=1.0, points=p.points_of([row]), is_printed=True))
    assert state.workers[0].metrics == {"loss": 0.5}
    assert still_ranks(later(state, 600.0)) == {}
    assert later(state, 600.0, output("evaluating\n")).advanced_at_s == 600.0
    reported = begun(progress(0, at_s=1.0, points=p.points_of([row])))
    assert set(still_ranks(later(reported, 600.0))) == {0}


def test_a_first_step_may_take_long():
    state = begun(progress(0, step=1.0, total=10.0))
    assert still_ranks(later(state, 50.0)) == {}
    assert set(still_ranks(later(state, 70.0))) == {0}


def test_a_run_whose_other_ranks_print_goes_on():
    state = later(begun(*steps(0, 0, 10)), 65.0, output("epoch 2\n", rank=3, node=1))
    assert set(still_ranks(state)) == {0}
    assert all_still_s(state, still_ranks(state)) is None


def test_ranks_are_asked_after_a_minute_and_quietly_before():
    assert look(later(training(), 19.0), -1.0) == ""
    assert look(later(training(), 20.5), -1.0) == "quiet"
    assert look(later(training(), 29.0), 20.5) == ""  # asked already
    assert look(later(training(), 31.5), 20.5) == "quiet"  # after twice that time
    assert look(later(training(), 69.0), 52.0) == ""
    state = later(training(), 71.0)
    assert look(state, 52.0) == "full"
    assert look(state, 70.5) == ""
    answered = later(state, 72.0, at(p.StacksDone(request_id="by hand", ranks=2), 0))
    assert look(answered, -1.0) == ""
    again = later(later(state, 73.0, progress(1, 0, at_s=73.0, step=11.0)), 140.0)
    assert look(again, 70.5) == "full"


def test_ranks_that_show_no_progress_are_asked_quietly_alone():
    state = later(begun(), 71.0)
    assert look(state, -1.0) == "quiet"
    assert look(state, 71.0) == ""
    assert look(later(begun(), 71.0, at(Broken(why="cut"), 0)), -1.0) == ""


def explained(parting: Parting | None) -> Explanation:
    return Explanation(groups=(), parting=parting)


def test_a_long_step_is_no_hang():
    """Only calls that differ are told at once; that ranks wait for others, where it lasts."""
    side = Side(ranks=(0,), call="all_reduce [4]", waiting=(0,))
    other = replace(side, ranks=(1,), call="broadcast [4]")
    different = Parting(kind="different", number=3, group="g", sides=(side, other))
    behind = Parting(
        kind="behind", number=3, group="g", sides=(side,), missing=(1,), waits_s=9.0
    )
    together = replace(behind, kind="together", missing=(), waits_s=99.0)
    slow = later(training(20.0), 211.0)  # five of its steps are 100 s
    assert is_worth_saying(slow, explained(different))
    assert not is_worth_saying(slow, explained(behind))
    assert is_worth_saying(slow, explained(replace(behind, waits_s=11.0)))
    assert not is_worth_saying(slow, explained(together))
    assert not is_worth_saying(slow, explained(None))
    still = later(training(), 21.0)
    assert is_worth_saying(still, explained(behind))
    assert not is_worth_saying(still, explained(None))
    assert is_worth_saying(later(training(), 71.0), explained(None))


PAUSED = p.Paused(rank=1, restart=0, prompt=1, file="train.py", line=4, asks="(Pdb) ")
RESUMED = p.Resumed(rank=1, restart=0, prompt=1)


def test_nobody_stands_still_while_a_rank_waits_for_somebody_to_type():
    paused = later(training(), 12.0, at(PAUSED, 0))
    state = later(paused, 500.0)
    assert still_ranks(state) == {}
    assert not is_hung(state, 60.0)
    assert not is_worth_asking(state, Inquiry())
    assert reason_to_stop(state, 30.0) == ""
    assert (state.paused_s, list(state.paused)) == (488.0, [1])
    # The clocks go on from where they were.
    resumed = later(state, 500.0, at(RESUMED, 0))
    assert resumed.paused == {}
    assert still_ranks(later(resumed, 509.0)) == {}
    assert set(still_ranks(later(resumed, 511.0))) == {0, 1, 2, 3}
    assert not is_hung(later(resumed, 559.0), 60.0)
    assert is_hung(later(resumed, 561.0), 60.0)
    assert reason_to_stop(later(resumed, 517.0), 30.0) == ""
    assert reason_to_stop(later(resumed, 519.0), 30.0) == "timeout"


@pytest.mark.parametrize(
    "end",
    [
        at(p.Ended(rank=1, restart=0, outcome="signalled", code=-9), 0),
        at(Lost(why="gone"), 0),
        at(p.Worker(rank=1, local_rank=1, world_size=4, restart=1, pid=9), 0),
    ],
)
def test_a_rank_that_is_gone_waits_for_nobody(end):
    paused = later(training(), 12.0, at(PAUSED, 0))
    assert later(paused, 13.0, end).paused == {}


def test_a_host_speaks_for_its_own_ranks():
    paused = later(training(), 12.0, at(PAUSED, 1))
    assert paused.paused == {}
    paused = later(training(), 12.0, at(PAUSED, 0), at(RESUMED, 1))
    assert list(paused.paused) == [1]


def of_cells(kind: type, cell: int, at_s: float) -> list[Event]:
    """Return the begin or the end of a cell on all ranks."""
    more = {rank: {} for rank in range(4)}
    if kind is p.CellEnded:
        more = {
            rank: {"ended": p.Ended(rank=rank, restart=0, outcome="returned")}
            for rank in range(4)
        }
    return [
        at(kind(cell=cell, rank=rank, **more[rank]), rank // 2, at_s)
        for rank in range(4)
    ]


def test_ranks_that_stay_are_asked_where_they_are_soon_in_a_cell_and_never_between():
    state = fold(training(), of_cells(p.CellBegan, 1, 11.0))
    state = fold(state, of_cells(p.CellEnded, 1, 12.0))
    idle = later(state, 2000.0)
    assert look(idle, -1.0) == ""
    assert still_ranks(idle) == {}
    state = fold(idle, of_cells(p.CellBegan, 2, 2000.0))
    assert look(later(state, 2009.0), 1500.0) == ""
    assert look(later(state, 2010.5), 1500.0) == "quiet"
