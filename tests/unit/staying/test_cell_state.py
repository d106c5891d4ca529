"""The state of one cell, folded from events of its session."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from distmagic import render
from distmagic.errors import Cancelled, WorkerFailed
from distmagic.remote.wire import protocol as p
from distmagic.request.cells.shell_commands import with_commands
from distmagic.state.events import Event, Gone
from distmagic.state.fold import begin, fold
from distmagic.state.verdict import verdict
from distmagic.staying import cell_state, out_of_step, past, stopping
from distmagic.staying.cell_state import CellState, begin_cell, take
from tests.builders.any_events import ANYTHING, FLOATS, SMALL, WORD, some
from tests.builders.events import HOSTS, at, hello, output, progress, worker

BEGAN_S = 100.0


def of_cell(cell: int = 1, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> CellState:
    """Return a cell that begins 100 s after its session, which has run another one."""
    events = [hello(0), hello(1)]
    events += [worker(rank, rank // 2, local=rank % 2) for rank in range(4)]
    events += [progress(0, step=7.0, total=9.0), output("before\n")]
    events.append(Event(node_rank=0, at_s=BEGAN_S, what=None))
    session = fold(begin("j", HOSTS), events)
    return begin_cell(session, cell, ranks, began_unix_s=5.0)


def cell_ended(rank: int, cell: int = 1, node: int | None = None, at_s: float = 103.0, **more: object) -> Event:  # fmt: skip
    own = ("shown", "value", "names")
    ended = {"outcome": "returned"}
    ended |= {name: value for name, value in more.items() if name not in own}
    what = p.CellEnded(
        cell=cell,
        rank=rank,
        ended=p.Ended(rank=rank, restart=0, **ended),
        **{name: value for name, value in more.items() if name in own},
    )
    return at(what, rank // 2 if node is None else node, at_s)


FAILURE = p.Failure(type="ValueError", message="no", traceback="Traceback ...")


def raised(rank: int, at_s: float = 103.0) -> Event:
    return cell_ended(rank, outcome="raised", code=1, failure=FAILURE, at_s=at_s)


def interrupted(rank: int) -> Event:
    return cell_ended(rank, outcome="signalled", code=-2)


def test_a_cell_begins_anew_whatever_its_ranks_have_done_before():
    run = of_cell().run
    assert (run.phase, run.cell, run.at_s, run.began_unix_s) == ("running", 1, 0.0, 5.0)
    assert {one.phase for one in run.workers.values()} == {"running"}
    assert run.workers[0].step is None
    assert run.lines == ()


def test_a_cell_for_one_rank_shows_no_other_rank_and_no_other_host():
    run = take(of_cell(ranks=(0,)), [cell_ended(0)]).run
    text = render.text(run)
    assert text.splitlines()[0].startswith(f"done 100% · 1 rank on {HOSTS[0]} · took")
    assert "never" not in text
    assert HOSTS[1] not in text


def test_a_cell_is_done_when_all_its_ranks_have_ended_it():
    cell = take(of_cell(), [cell_ended(rank) for rank in (0, 1, 2)])
    assert not cell.run.is_over
    assert cell.at_work == (3,)
    cell = take(cell, [cell_ended(3)])
    assert (cell.run.phase, cell.run.at_s) == ("done", 3.0)
    assert verdict(cell.run) is None


def test_other_cells_and_other_ranks_count_for_nothing():
    cell = of_cell(cell=2, ranks=(0,))
    cell = take(cell, [cell_ended(0, cell=1)])
    assert cell.ends == {}
    cell = take(cell, [output("of another\n", rank=1), progress(0, step=3.0)])
    assert [line.text for line in cell.run.lines] == []
    assert cell.run.workers[0].step == 3.0
    assert take(cell, [cell_ended(0, cell=2)]).run.phase == "done"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("lr = 1\nfit(lr,\n    steps=3)\n# the end", "fit(lr, steps=3)"),
        ("losses = fit(0.02)", "fit(0.02)"),
        ("total += fit(0.02)", "total += fit(0.02)"),
        ("for x in y:\n    fit(x)", "for x in y:"),
        ("await fit()", "await fit()"),
        ("# nothing yet", ""),
    ],
)
def test_the_title_of_a_cell_is_its_last_statement(text, title):
    assert cell_state.title(text) == title


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("!nvidia-smi", "!nvidia-smi"),
        ("x = 1\n!df -h {x}", "!df -h {x}"),
        ("files = !awk '{print $1}' a", "!awk '{print $1}' a"),
    ],
)
def test_the_title_of_a_shells_command_is_the_command(text, title):
    made = with_commands(text, TransformerManager().transform_cell)
    assert cell_state.title(made) == title


def test_an_exception_fails_the_cell_alone():
    cell = take(of_cell(), [raised(2), *(cell_ended(rank) for rank in (0, 1, 3))])
    assert cell.run.phase == "failed"
    error = verdict(cell.run)
    assert isinstance(error, WorkerFailed)
    assert "rank 2 (gpu-b, local_rank 0) raised ValueError: no" in error.message


def test_ranks_that_wait_for_one_that_has_failed_are_interrupted_once():
    cell = take(of_cell(), [raised(2), cell_ended(0)])
    assert cell_state.peers_to_interrupt(cell) == ()
    later = Event(node_rank=0, at_s=104.5, what=None)
    cell = take(cell, [later])
    assert cell_state.peers_to_interrupt(cell) == (1, 3)
    cell = cell_state.interrupted(cell, (1, 3), by_user=False)
    assert cell_state.peers_to_interrupt(cell) == ()
    cell = take(cell, [interrupted(1), interrupted(3)])
    phases = [one.phase for _, one in sorted(cell.run.workers.items())]
    assert phases == ["done", "stopped", "failed", "stopped"]
    assert isinstance(verdict(cell.run), WorkerFailed)


def test_an_interrupt_of_the_user_is_one():
    cell = cell_state.interrupted(of_cell(), (0, 1, 2, 3), by_user=True)
    cell = take(cell, [interrupted(rank) for rank in range(4)])
    assert cell.run.phase == "stopped"
    error = verdict(cell.run)
    assert isinstance(error, Cancelled)
    assert error.message == "The cell was interrupted. Its ranks stay, with all names."


def test_a_rank_that_dies_ends_the_cell_with_its_session_alone():
    killed = p.Ended(rank=1, restart=0, outcome="signalled", code=-9)
    ends = [cell_ended(rank) for rank in (0, 2, 3)]
    cell = take(of_cell(), [at(killed, 0, 102.0), *ends])
    assert not cell.run.is_over
    assert cell.run.first_failure == 1


@pytest.mark.parametrize("first", ["the peers' ends", "the killed rank"])
def test_a_rank_that_is_killed_is_the_cause_in_whatever_order_its_peers_end(first):
    """They lose it in a call, raise, and are ended: with code 0, or by SIGTERM."""
    lost = p.Failure(
        type="RuntimeError", message="Connection closed by peer [10.99.0.11]:26506", traceback="Traceback ...",
    )  # fmt: skip
    raise_ = [
        cell_ended(rank, outcome="raised", code=1, failure=lost) for rank in (2, 3)
    ]
    returned = p.Ended(rank=3, restart=0, outcome="returned", result_bytes=0)
    asked = p.Ended(rank=2, restart=0, outcome="signalled", code=-15)
    peers = [at(returned, 1, 103.1), at(asked, 1, 103.1)]
    killed = [at(p.Ended(rank=1, restart=0, outcome="signalled", code=-9), 0, 103.2)]
    ends = [*peers, *killed] if first == "the peers' ends" else [*killed, *peers]
    cell = take(of_cell(), [*raise_, *ends])
    assert cell.run.first_failure == 1
    error = verdict(cell.run)
    assert isinstance(error, WorkerFailed)
    assert "rank 1 (gpu-a, local_rank 1) was ended by signal 9" in error.message


def test_a_rank_that_torchrun_has_asked_to_end_because_of_another_is_no_cause():
    """Torchrun knows first that rank 1 is dead, and ends rank 0; how rank 1 ended is known after that."""
    asked = p.Ended(rank=0, restart=0, outcome="signalled", code=-15)
    killed = p.Ended(rank=1, restart=0, outcome="signalled", code=-9)
    stopping = p.NodeStopping(reason="failed")
    cell = take(of_cell(), [at(asked, 0, 102.0), at(stopping, 0, 102.1)])
    cell = take(cell, [at(killed, 0, 102.2)])
    assert cell.run.first_failure == 1
    assert cell.run.workers[0].phase == "stopped"
    # Of another host it explains nothing.
    elsewhere = p.Ended(rank=2, restart=0, outcome="signalled", code=-9)
    cell = take(of_cell(), [at(asked, 0, 102.0), at(elsewhere, 1, 102.2)])
    assert cell.run.first_failure == 0


def test_what_ranks_show_is_said_once_where_it_is_equal():
    texts = ("0.5", "", "0.5", "0.5", "two\nlines")
    ends = {rank: cell_ended(rank, shown=text).what for rank, text in enumerate(texts)}
    assert cell_state.shown(ends) == ["ranks 0,2-3: 0.5", "rank 4:\ntwo\nlines"]


def test_ranks_end_with_a_cell_that_not_all_of_them_have_ended():
    state = take(of_cell(), [cell_ended(rank) for rank in range(4)])
    assert state.run.is_over
    assert not state.ends_ranks
    gone = [Event(node_rank=node, at_s=104.0, what=Gone()) for node in range(2)]
    state = take(of_cell(), [cell_ended(0), *gone])
    assert state.run.is_over
    assert state.ends_ranks


ENDED = st.builds(
    p.Ended,
    rank=SMALL,
    restart=SMALL,
    outcome=WORD,
    code=SMALL,
    failure=st.none() | st.just(FAILURE),
)
GROUP = st.builds(p.GroupCalls, name=WORD, size=SMALL, calls=SMALL, last=WORD)
OF_CELLS = st.one_of(
    st.builds(p.CellBegan, cell=SMALL, rank=SMALL, is_users=st.booleans(), text=WORD),
    st.builds(
        p.StepCount,
        cell=SMALL,
        rank=SMALL,
        steps=SMALL,
        iterations=SMALL,
        idle_s=FLOATS,
        step_s=FLOATS,
    ),
    st.builds(
        p.CellEnded,
        cell=SMALL,
        rank=SMALL,
        ended=ENDED,
        shown=WORD,
        value=WORD,
        names=some(WORD),
        groups=some(GROUP),
        holders=some(WORD),
        is_broken=st.booleans(),
        logged=some(SMALL),
    ),
)
HEARD = st.lists(
    st.builds(
        Event,
        node_rank=st.integers(0, 1),
        at_s=st.floats(BEGAN_S, BEGAN_S + 100),
        what=OF_CELLS | ANYTHING,
    ),
    max_size=30,
)


@given(st.lists(HEARD, max_size=5))
def test_whatever_hosts_say_of_a_cell_fails_no_notebook(batches):
    cell, seen = of_cell(), past.Past()
    for events in batches:
        cell = stopping.next_stage(take(cell, events))
        seen = past.take(seen, events)
        for _ in range(3):
            cell, _ = stopping.due(cell)
        stopping.is_stuck(cell)
        told = (*cell_state.shown(cell.ends), stopping.stopped_after(cell), stopping.raised_after(cell))  # fmt: skip
        assert all(isinstance(text, str) for text in told)
        assert all(data for data in cell_state.values(cell.ends).values())
        out_of_step.notice(cell.ends)
        render.html(cell.run)
    assert set(seen.ends) <= set(seen.names)


def test_a_host_ends_no_cell_of_the_ranks_of_another_one():
    cell = take(of_cell(), [cell_ended(0, node=1)])
    assert (cell.ends, cell.at_work) == ({}, (0, 1, 2, 3))
