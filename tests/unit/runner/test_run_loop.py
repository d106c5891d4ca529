"""What is decided about a run under way, and how a run is driven to its end: scripts of events, a clock that is ours."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.errors import ConnectionLost, NodeLost
from distmagic.remote.wire import protocol as p
from distmagic.render.screen import TypedLine
from distmagic.runner.actions import Linked, LinkEnded, Send
from distmagic.state.decide import (
    CONFIRM_S,
    GRACE_S,
    NODE_LOST_S,
    Limits,
    alive_elsewhere,
    can_detach,
    overdue,
    reason_to_stop,
    too_late,
)
from distmagic.state.events import Broken, Event, Gone, Lost, Planned, StopRequested
from distmagic.state.fold import UNHEARD, begin, fold
from distmagic.state.model import RunState
from distmagic.state.verdict import verdict
from tests.builders.any_events import EVENTS
from tests.builders.events import HOSTS, at, begun, ended, hello, killed, raised, worker
from tests.builders.runs import START, FakeScreen, ScriptedRun, end_of
from tests.builders.terms import terms

UNREACHED = at(p.Endpoint(state="unreached", detail="refused"), 1)
OPEN = at(p.Endpoint(state="open"), 0, at_s=10.0)


@pytest.mark.parametrize(
    ("events", "restarts", "timeout_s", "reason"),
    [
        ([], 0, None, ""),
        ([at(None, at_s=9.0)], 0, 10.0, ""),
        ([at(None, at_s=10.1)], 0, 10.0, "timeout"),
        ([at(Lost(why="cut"), 1)], 0, None, "lost"),
        ([raised(2, 1)], 0, None, "failed"),
        ([raised(2, 1)], 1, None, ""),
        ([raised(2, 1), at(p.EngineEnded(code=1), 1)], 1, None, "failed"),
        ([at(p.EngineEnded(code=0), 1)], 0, None, ""),
        ([at(p.EngineEnded(code=-9), 1)], 0, None, "failed"),
        ([at(StopRequested(reason="interrupted")), raised(2, 1), at(Lost(why="cut"), 1)], 0, 0.1, "interrupted"),
        ([UNREACHED, OPEN, at(None, at_s=14.0)], 0, None, ""),
        ([UNREACHED, OPEN, at(None, at_s=15.1)], 0, None, "rendezvous"),
        ([UNREACHED, OPEN, at(p.Endpoint(state="reached"), 1), at(None, at_s=99.0)], 0, None, ""),
        ([OPEN, at(None, at_s=99.0)], 0, None, ""),
        ([UNREACHED, at(None, at_s=119.0)], 0, None, ""),
        ([UNREACHED, at(None, at_s=121.0)], 0, None, "rendezvous"),
        ([at(Gone(), 0), at(Gone(), 1), raised(2, 1)], 0, 0.1, ""),
    ],
)  # fmt: skip
def test_when_a_run_is_stopped(events, restarts, timeout_s, reason):
    assert reason_to_stop(begun(*events, restarts=restarts), timeout_s) == reason


RETURNED = [ended(0, 0), ended(1, 0)]


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([*RETURNED, raised(2, 1), at(None, at_s=15.0)], ""),
        ([*RETURNED, raised(2, 1), at(None, at_s=17.0)], "failed"),
        ([*RETURNED, ended(3, 1), raised(2, 1, at_s=99.0)], ""),
        ([*RETURNED, killed(2, 1), killed(3, 1), at(None, at_s=17.0)], "failed"),
        ([ended(0, 0), raised(2, 1), at(None, at_s=99.0)], ""),
        ([*RETURNED, raised(2, 1), worker(2, 1, restart=1), at(None, at_s=99.0)], ""),
        ([*RETURNED, at(None, at_s=99.0)], ""),
    ],
    ids=[
        "just now", "for long", "after long", "by signals", "one node at work", "started again", "all well",
    ],
)  # fmt: skip
def test_a_failed_rank_that_waits_for_nodes_that_have_ended_stops_the_run(
    events, reason
):
    """It would be started again, but torchrun waits for minutes for the others to meet."""
    assert reason_to_stop(begun(*events, restarts=3), None) == reason


def test_in_an_elastic_job_too_a_failed_rank_waits_for_a_node_that_has_ended_in_vain():
    job = begin("j", ("gpu-a", "gpu-b", "gpu-c"), terms(3, min_nodes=1))
    job = fold(job, [worker(node, node, world=3) for node in range(3)])
    failed = fold(job, [raised(1, 1), at(None, at_s=99.0)])
    assert reason_to_stop(failed, None) == ""
    ended_too = fold(failed, [ended(2, 2, at_s=99.0), at(None, at_s=199.0)])
    assert reason_to_stop(ended_too, None) == "failed"


def driven(
    run: ScriptedRun, timeout_s: float | None = None, restarts: int = 0
) -> RunState:
    return run.run(Limits(timeout_s=timeout_s), restarts=restarts)


def elastic(*events: Event, world: int = 2) -> RunState:
    """Return the state of a job of two hosts that goes on with one; a third one has come."""
    whole = [
        hello(0),
        hello(1),
        worker(0, 0, world=world),
        worker(1, 1, world=world),
        OPEN,
    ]
    planned = at(
        Planned(addresses=("10.0.0.1", "10.0.0.2"), terms=terms(0, min_nodes=1))
    )
    return fold(
        begin("j", HOSTS, terms(3)),
        [
            planned,
            *whole,
            at(p.NodeAdded(request_id="a1", hosts=(*HOSTS, "gpu-c"))),
            *events,
        ],
    )


def test_ranks_of_a_run_that_stands_still_are_asked_once_where_they_are():
    moving = [at(report_at(rank, 12.0), rank // 2, at_s=12.0) for rank in range(4)]
    again = [at(report_at(rank, 144.0), rank // 2, at_s=144.0) for rank in range(4)]
    ends = [*(ended(rank, rank // 2) for rank in range(4)), *end_of(0), *end_of(1)]
    run = ScriptedRun(
        START, [], moving, *[[]] * 20, again, *[[]] * 20, ends, step_s=6.0
    )
    asked: list[tuple[float, int]] = []
    run.run(screen=FakeScreen(lambda state: asked.append((state.at_s, run.asks))))
    counts = sorted({count for _, count in asked})
    assert counts == [0, 1, 2]
    first_s = min(at_s for at_s, count in asked if count == 1)
    assert 72.0 <= first_s <= 84.0
    assert run.stops == []


def test_a_click_stops_a_run_and_a_second_one_at_once():
    ends = [*end_of(0, -15, "interrupted"), *end_of(1, -15, "interrupted")]
    run = ScriptedRun(START, [], [], [], ends)
    screen = FakeScreen()
    screen.clicks = ["stop", "stop"]
    state = run.run(screen=screen)
    assert [(grace, reason) for _, grace, reason in run.stops] == [
        (state.terms.grace_s, "interrupted"),
        (0.0, "interrupted"),
    ]
    assert (state.phase, state.stopping) == ("stopped", "interrupted")


def test_a_click_asks_all_ranks_where_they_are():
    ends = [*(ended(rank, rank // 2) for rank in range(4)), *end_of(0), *end_of(1)]
    run = ScriptedRun(START, [], [], ends)
    screen = FakeScreen()
    screen.clicks = ["stacks"]
    state = run.run(screen=screen)
    assert (run.asks, run.stops) == (1, [])
    assert state.wanted_stacks == "ask1"


def test_a_click_lets_a_job_go_on_alone():
    joined = at(p.PeerState(node_rank=1, state="joined"), 0)
    alone = [at(p.Detached(why="asked"), 0)]
    run = ScriptedRun([*START, joined], [], [], alone)
    screen = FakeScreen()
    screen.clicks = ["detach"]
    state = run.run(screen=screen)
    assert not state.is_over
    assert state.detached_by == "asked"
    sent = [action.message for action in run.actions if isinstance(action, Send)]
    assert any(isinstance(message, p.DetachJob) for message in sent)
    assert run.stops == []


def test_a_click_does_not_let_ranks_that_stay_go_on_alone():
    stays = replace(terms(), stays=True)
    planned = at(Planned(addresses=("10.0.0.1", "10.0.0.2"), terms=stays))
    joined = at(p.PeerState(node_rank=1, state="joined"), 0)
    ends = [*(ended(rank, rank // 2) for rank in range(4)), *end_of(0), *end_of(1)]
    run = ScriptedRun([planned, *START, joined], [], [], ends)
    screen = FakeScreen(lambda _: screen.clicks.append("detach"))
    assert run.run(screen=screen).is_over
    sent = [action.message for action in run.actions if isinstance(action, Send)]
    assert not any(isinstance(message, p.DetachJob) for message in sent)


def report_at(rank: int, at_s: float) -> p.Progress:
    """Return the report of a first step, or of the second one much later."""
    return p.Progress(rank=rank, restart=0, at_s=at_s, step=at_s, total=1000.0)


def test_a_host_that_comes_and_can_not_dial_the_others_stops_no_elastic_job():
    late = at(
        p.Endpoint(state="unreached", detail="10.0.0.1 port 29500 (no answer)"), 2
    )
    assert reason_to_stop(elastic(late, at(None, at_s=999.0)), None) == ""


def test_a_host_that_comes_when_an_elastic_job_is_over_changes_nothing():
    lead, other = ([ended(node, node), *end_of(node)] for node in (0, 1))
    assert too_late(elastic(*other)) == ()
    assert too_late(elastic(*lead, *other)) == (), "it has not been met"
    assert too_late(elastic(*lead, *other, hello(2))) == (2,)
    state = elastic(*lead, *other, *end_of(2, 1, "too late"))
    assert (state.phase, reason_to_stop(state, None), too_late(state)) == (
        "done",
        "",
        (),
    )


def test_who_comes_too_late_is_stopped():
    added, gone = (
        [at(p.NodeAdded(request_id="a1", hosts=(*HOSTS, "gpu-c")))],
        [*end_of(0), *end_of(1)],
    )
    planned = at(Planned(addresses=("", ""), terms=terms(0, min_nodes=1)))
    run = ScriptedRun(
        [planned, *START],
        added,
        [ended(r, r // 2) for r in range(4)],
        gone,
        [hello(2)],
        [],
        end_of(2, -9),
    )
    assert driven(run, restarts=1).phase == "done"
    assert run.stops == [([2], 0.0, "too late")]


def test_a_run_to_its_end():
    run = ScriptedRun(
        START, [], [ended(r, r // 2) for r in range(4)], end_of(0), end_of(1)
    )
    state = driven(run)
    assert (state.phase, run.stops, run.elapsed_s, state.at_s) == ("done", [], 2.5, 2.5)


def test_a_failure_stops_the_others_and_is_waited_for():
    run = ScriptedRun(START, [raised(2, 1)], [], end_of(1, 1), end_of(0, -15, "failed"))
    state = driven(run)
    assert run.stops == [([0, 1], GRACE_S, "failed")]
    assert (state.phase, state.first_failure, state.stopping) == ("failed", 2, "failed")


def test_an_interrupt_asks_politely_and_a_second_one_ends_at_once():
    run = ScriptedRun(
        START,
        KeyboardInterrupt,
        [],
        KeyboardInterrupt,
        [*end_of(0, -15), *end_of(1, -15)],
    )
    state = driven(run)
    assert run.stops == [
        ([0, 1], state.terms.grace_s, "interrupted"),
        ([0, 1], 0.0, "interrupted"),
    ]
    assert (state.phase, state.stopping) == ("stopped", "interrupted")


def test_an_interrupt_of_a_run_that_stops_already_ends_it_at_once():
    run = ScriptedRun(
        START, [raised(0)], KeyboardInterrupt, [*end_of(0, 1), *end_of(1, -15)]
    )
    state = driven(run)
    assert run.stops == [([0, 1], GRACE_S, "failed"), ([0, 1], 0.0, "interrupted")]
    assert state.stopping == "failed"


def test_only_nodes_that_answer_are_asked_to_stop():
    run = ScriptedRun(START, [at(Lost(why="cut"), 1)], end_of(0, -15))
    state = driven(run)
    assert run.stops == [([0], GRACE_S, "lost")]
    assert state.phase == "lost"


def cut_off_and_back(*words: Event) -> ScriptedRun:
    """Return a run whose node 1 is out of reach, and missed by the other one; then it is back, and says these words."""
    link = SimpleNamespace(agent_error="", kept=None)
    broken = at(LinkEnded(link=link, last=9, error=ConnectionLost("cut")), 1)
    missing = at(p.NodeStopping(reason="lost", culprit=1), 0)
    back = [at(Linked(link=link), 1), *words]
    return ScriptedRun(START, [broken], [missing], [], back, end_of(0, -15, "lost"))


def test_a_lost_node_that_is_back_before_the_run_is_over_explains_itself():
    """So it is followed, and connected to, although the run goes on, or ends, without it."""
    state = driven(cut_off_and_back(raised(2, 1)))
    assert state.lost == {1: UNHEARD}
    assert (state.phase, state.first_failure) == ("failed", 2)


def test_nothing_is_said_to_run_on_a_lost_node_that_has_ended_after_all(golden):
    left = verdict(driven(cut_off_and_back()))
    assert isinstance(left, NodeLost)
    golden(left)
    ended_too = verdict(driven(cut_off_and_back(*end_of(1, -15, "lost"))))
    assert isinstance(ended_too, NodeLost)
    assert ended_too.hint == ""


def test_a_node_that_does_not_confirm_is_given_up():
    run = ScriptedRun(START, [raised(0)], end_of(0, 1))
    state = driven(run)
    assert state.lost == {1: "it did not confirm its end"}
    assert run.elapsed_s == pytest.approx(1.0 + GRACE_S + CONFIRM_S, abs=1.0)
    assert [w.phase for _, w in sorted(state.workers.items())] == [
        "failed",
        "stopped",
        "lost",
        "lost",
    ]


def test_a_second_interrupt_shortens_the_wait():
    run = ScriptedRun(START, KeyboardInterrupt, KeyboardInterrupt)
    assert len(driven(run).lost) == 2
    assert run.elapsed_s == pytest.approx(1.5 + CONFIRM_S, abs=1.0)


def test_the_screen_is_shown_at_most_ten_times_a_second():
    screen = FakeScreen()
    run = ScriptedRun(START, *[[]] * 98, [*end_of(0), *end_of(1)], step_s=0.01)
    run.run(screen=screen)
    assert 9 <= len(screen.shown) <= 11


@pytest.fixture
def own_heap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have nothing frozen, as in a notebook.

    What the tests have imported is so and does not count: to collect it takes half a second.
    """
    frozen, freeze, unfreeze = [0], gc.freeze, gc.unfreeze

    def freeze_and_count() -> None:
        frozen[0] += len(gc.get_objects())  # of those that are not frozen
        freeze()

    def unfreeze_all() -> None:
        frozen[0] = 0
        unfreeze()

    monkeypatch.setattr(gc, "freeze", freeze_and_count)
    monkeypatch.setattr(gc, "unfreeze", unfreeze_all)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen[0])
    yield
    freeze()


class CountingScreen(FakeScreen):
    """Notes at each state how much of the heap the garbage collector leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen: list[int] = []

    def show(self, state: RunState) -> None:
        super().show(state)
        self.frozen.append(gc.get_freeze_count())


@pytest.mark.usefixtures("own_heap")
def test_the_heap_is_left_alone_while_a_long_run_goes_on_and_only_then():
    screen = CountingScreen()
    ScriptedRun(START, [], [], [], [*end_of(0), *end_of(1)], step_s=2.0).run(
        screen=screen
    )
    assert screen.frozen[0] == 0
    assert screen.frozen[-1] > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("own_heap")
def test_a_short_run_freezes_nothing():
    """Each freeze puts the next full collection off, and a notebook of short runs would never have one."""
    screen = CountingScreen()
    ScriptedRun(START, [*end_of(0), *end_of(1)]).run(screen=screen)
    assert set(screen.frozen) == {0}


@pytest.mark.usefixtures("own_heap")
def test_beside_a_run_in_the_background_the_notebook_s_garbage_is_still_found():
    screen = CountingScreen()
    scripted = ScriptedRun(START, *[[]] * 20, [*end_of(0), *end_of(1)])
    thread = threading.Thread(target=scripted.run, kwargs={"screen": screen})
    thread.start()
    thread.join()
    assert len(screen.frozen) > 10, "it was a long one"
    assert set(screen.frozen) == {0}


@pytest.mark.usefixtures("own_heap")
def test_garbage_from_before_a_long_run_is_not_kept_by_it():
    class Node:
        pass

    gc.collect()
    before, after = Node(), Node()
    before.other, after.other = after, before  # only a garbage collection frees the two
    gone = weakref.ref(before)
    del before, after
    ScriptedRun(START, [], [], [], [*end_of(0), *end_of(1)], step_s=2.0).run()
    assert gone() is None


@pytest.mark.usefixtures("own_heap")
def test_a_heap_that_somebody_else_has_frozen_stays_so():
    gc.freeze()
    try:
        ScriptedRun(START, [], [], [], [*end_of(0), *end_of(1)], step_s=2.0).run()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@given(st.lists(EVENTS | st.just(KeyboardInterrupt), max_size=8), st.integers(0, 1))
def test_any_run_that_is_interrupted_ends(script, restarts):
    """Whatever hosts say or don't say, an interrupted run is over when the last node was given up."""
    # Events get their time from the loop's own clock: none is of the future.
    steps = [
        step
        if step is KeyboardInterrupt
        else [replace(event, at_s=0.0) for event in step]
        for step in script
    ]
    run = ScriptedRun(*steps, KeyboardInterrupt, step_s=0.5)
    state = driven(run, restarts=restarts)
    assert state.is_over
    assert (
        run.elapsed_s < 0.5 * (len(script) + 1) + state.terms.grace_s + CONFIRM_S + 2.0
    )
    assert fold(state, []) == state


def test_a_job_can_be_left_alone_when_all_that_are_there_hear_each_other():
    joined = at(p.PeerState(node_rank=1, state="joined"))
    assert not can_detach(elastic())
    assert not can_detach(elastic(joined))
    third = [
        at(p.Hello(protocol=p.PROTOCOL, job="j", node_rank=2, hostname="c", pid=3), 2),
        worker(2, 2, world=3),
    ]
    assert not can_detach(elastic(joined, *third, world=3))
    assert can_detach(
        elastic(joined, *third, at(p.PeerState(node_rank=2, state="joined")), world=3)
    )
    assert can_detach(elastic(joined, at(Lost(why="switched off"), 2)))


def test_a_job_is_not_left_before_all_its_ranks_have_begun():
    joined = at(p.PeerState(node_rank=1, state="joined"))
    some = [
        hello(0),
        hello(1),
        worker(0, 0),
        worker(2, 1),
        worker(3, 1, local=1),
        joined,
    ]
    state = fold(begin("j", HOSTS, terms(0)), some)
    assert not can_detach(state)
    assert can_detach(fold(state, [worker(1, 0, local=1)]))


def test_a_job_can_be_left_alone_though_a_node_of_it_is_not_known_here():
    """Another notebook has brought gpu-c; how far its ranks are can't be told, but the others hear it."""
    joined = at(p.PeerState(node_rank=1, state="joined"))
    unknown = at(Lost(why="it is not among the hosts of this notebook"), 2)
    state = elastic(joined, unknown, world=3)
    assert not can_detach(state)
    heard = at(p.PeerState(node_rank=2, state="joined"))
    assert can_detach(fold(state, [heard, unknown]))


def test_which_nodes_are_down_for_this_notebook_alone():
    """As long as another one is followed: else it is this notebook that is cut off."""

    def late(*events: Event) -> tuple[int, ...]:
        state = begun(*events)
        return overdue(replace(state, at_s=state.at_s + NODE_LOST_S + 1.0))

    cut = at(Broken(why="cut"), 1)
    joined = at(p.PeerState(node_rank=1, state="joined"))
    assert late(cut) == (1,)
    assert late(cut, at(Broken(why="cut"), 0)) == (), "their lease counts"
    assert late(joined, cut) == (), "the other hosts hear it"
    assert late(at(p.Detached(why="disconnected")), cut) == ()
    assert overdue(begun(cut)) == (), "it has some seconds"


def test_which_nodes_run_although_this_notebook_can_not_reach_them():
    cut, joined = at(Broken(why="cut"), 1), at(p.PeerState(node_rank=1, state="joined"))
    detached = at(p.Detached(why="asked"))

    def alive(state: RunState) -> frozenset[int]:
        return alive_elsewhere(state, Limits())

    assert alive(begun(cut)) == frozenset(), "nobody else has told of it"
    assert alive(begun(joined, cut)) == {1}
    assert alive(begun(detached, cut)) == {0, 1}, "the job needs no notebook"
    assert (
        alive(begun(joined, detached, cut, at(Broken(why="cut"), 0))) == frozenset()
    ), "none is followed"
    assert alive(begun(joined, cut, at(StopRequested(reason="failed")))) == frozenset()
    assert alive(begun(joined, cut, at(Gone(), 0))) == frozenset(), (
        "the others are over"
    )


def test_a_typed_line_is_sent_once_and_once_more_over_a_new_link():
    """The host takes it once: it names the prompt. A line for a prompt that is over is sent nowhere."""
    line = TypedLine(rank=1, prompt=3, text="p x")
    typed = [line]
    screen = FakeScreen(
        lambda state: (
            screen.clicks.append(typed.pop()) if state.paused and typed else None
        )
    )
    paused = p.Paused(rank=1, restart=0, prompt=3, file="train.py", line=4)
    again = SimpleNamespace(agent_error="", kept="the second link")
    cut = LinkEnded(link=again, last=9, error=ConnectionLost("cut"))
    run = ScriptedRun(
        START,
        [at(paused, 0)],
        [],
        [],
        [at(cut, 0)],
        [],
        [at(Linked(link=again), 0)],
        [],
        [at(p.Resumed(rank=1, restart=0, prompt=3), 0)],
        [at(replace(paused, prompt=4), 0)],
        [],
        [*end_of(0), *end_of(1)],
    )
    run.run(screen=screen)
    sent = [
        (action.links, action.message)
        for action in run.actions
        if isinstance(action, Send) and isinstance(action.message, p.RankInput)
    ]
    message = p.RankInput(rank=1, prompt=3, text="p x")
    assert [one for _, one in sent] == [message, message]
    assert sent[1][0] == (again,)
    assert sent[0][0] != sent[1][0]
