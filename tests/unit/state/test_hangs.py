"""Ranks that go nowhere: how they are asked, and the words for where they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic import render
from distmagic.errors import Cancelled, Hung, TimedOut
from distmagic.remote.wire import protocol as p
from distmagic.render.overview import overview
from distmagic.state import explanation, hangs
from distmagic.state.decide import Limits
from distmagic.state.events import Event, Lost, StopRequested
from distmagic.state.explanation import Explanation
from distmagic.state.fold import fold
from distmagic.state.hangs import explain
from distmagic.state.model import RunState
from distmagic.state.progress import is_hung
from distmagic.state.standstill import (
    STACKS_S,
    WORTH_ASKING_S,
    Inquiry,
    hang_inquiry,
    reason_after_inquiry,
)
from distmagic.state.verdict import verdict
from tests.builders.any_events import EVENTS
from tests.builders.events import (
    HOSTS,
    at,
    begun,
    ended,
    output,
    progress,
    raised,
)
from tests.builders.runs import START, ScriptedRun, end_of

CELL = "Cell In[3]"
C10D = "torch/distributed/distributed_c10d.py"


def frame(
    file: str, line: int, function: str, mine: bool = False, text: str = ""
) -> p.Frame:
    return p.Frame(file=file, line=line, function=function, mine=mine, text=text)


MAIN = frame(CELL, 20, "<module>", mine=True, text="train()")
LOADS = (MAIN, frame(CELL, 9, "load_batch", mine=True, text="time.sleep(9)"))
REDUCES = (MAIN, frame(CELL, 14, "train", mine=True), frame("torch/distributed/c10d_logger.py", 81, "wrapper"),
           frame(C10D, 2810, "all_reduce"))  # fmt: skip


def stack(
    rank: int, *frames: p.Frame, silence: str = "", request_id: str = "ask1"
) -> p.Stacks:
    threads = (p.Thread(frames=frames),) if frames else ()
    return p.Stacks(
        request_id=request_id,
        rank=rank,
        local_rank=rank % 2,
        threads=threads,
        silence=silence,
    )


def made(
    *names: str, over: bool = True, waits_s: float = 30.0, **group: str
) -> p.GroupRecord:
    """Return the calls of a rank in a group, each as `all_reduce [4]`; the last one waits unless it is `over`."""
    calls = []
    for number, name in enumerate(names, 1):
        word, _, sizes = name.partition(" ")
        is_over = over or number < len(names)
        calls.append(
            p.CallRecord(number=number, name=word, sizes=sizes, is_over=is_over)
        )
    return p.GroupRecord(
        backend="gloo", waits_s=0.0 if over else waits_s, calls=tuple(calls), **group
    )


def with_calls(one: p.Stacks, *groups: p.GroupRecord) -> p.Stacks:
    return replace(one, calls=groups)


def explained(*stacks: p.Stacks, unanswered: tuple[str, ...] = ()) -> Explanation:
    return explain([(HOSTS[one.rank // 2 % 2], one) for one in stacks], unanswered)


# ---- in words


def test_who_stands_out_comes_first(golden):
    found = explained(*(stack(rank, *REDUCES) for rank in (3, 1, 0)), stack(2, *LOADS))
    golden(found.sentence, found.advice)


def test_who_is_not_in_a_collective_stands_out_although_they_are_more(golden):
    found = explained(stack(0, *REDUCES), *(stack(rank, *LOADS) for rank in (1, 2, 3)))
    golden(found.sentence, found.advice)


def test_all_in_the_same_call(golden):
    found = explained(*(stack(rank, *REDUCES) for rank in range(4)))
    golden(
        found.sentence,
        found.advice,
        explained(stack(0, *REDUCES), stack(1, *REDUCES)).sentence,
    )


MEETS = (MAIN, frame(CELL, 14, "setup", mine=True), frame("torch/distributed/c10d_logger.py", 81, "wrapper"),
         frame(C10D, 1889, "init_process_group"), frame("torch/distributed/rendezvous.py", 200, "_create_c10d_store"))  # fmt: skip
SPAWNS = (MAIN, frame("torch/multiprocessing/spawn.py", 340, "spawn"), frame("torch/multiprocessing/spawn.py", 120, "join"),
          frame("multiprocessing/connection.py", 948, "wait"))  # fmt: skip
JOINS = (MAIN, frame("multiprocessing/process.py", 149, "join"), frame("multiprocessing/popen_fork.py", 43, "wait"))  # fmt: skip
POOLS = (MAIN, frame("multiprocessing/pool.py", 771, "get"), frame("threading.py", 629, "wait"))  # fmt: skip


@pytest.mark.parametrize(
    ("frames", "words"),
    [(MEETS, "MASTER_ADDR"), (SPAWNS, "mp.spawn"), (JOINS, "mp.spawn"), (POOLS, "")],
)
def test_what_waits_for_ranks_that_torchrun_has_not_started_is_no_fault_of_the_network(
    frames, words
):
    for ranks in (1, 2):
        advice = explained(*(stack(rank, *frames) for rank in range(ranks))).advice
        assert words in advice
        assert "network" not in advice
        assert bool(advice) is bool(words)


def test_different_collectives(golden):
    barrier = (MAIN, frame(CELL, 30, "train", mine=True), frame(C10D, 4800, "barrier"))
    found = explained(stack(0, *REDUCES), stack(1, *REDUCES), stack(2, *barrier))
    golden(found.sentence, found.advice)


BROADCASTS = (MAIN, frame(CELL, 18, "train", mine=True), frame(C10D, 2700, "broadcast"))
START_OF_ALL = ("all_reduce [4]", "broadcast [4]")


def parted(*calls: tuple[str, ...] | None) -> Explanation:
    """Return where ranks are that have made these calls, and wait in the last one; None is a rank that waits in none."""
    stacks = []
    for rank, names in enumerate(calls):
        over = len(names) <= len(START_OF_ALL)
        frames = LOADS if over else BROADCASTS if names[-1].startswith("b") else REDUCES
        stacks.append(with_calls(stack(rank, *frames), made(*names, over=over)))
    return explained(*stacks)


def test_calls_that_differ_are_told_with_their_lines(golden):
    reduce, broadcast = (
        (*START_OF_ALL, "all_reduce [4]"),
        (*START_OF_ALL, "broadcast [4]"),
    )
    of_two = parted(reduce, broadcast)
    of_four = parted(reduce, broadcast, reduce, reduce)
    sizes = parted(reduce, (*START_OF_ALL, "all_reduce [9]"))
    three = parted(reduce, reduce, broadcast, (*START_OF_ALL, "barrier"))
    golden(
        of_two.sentence, of_two.advice, of_four.sentence, sizes.sentence, three.sentence
    )
    # Of two with a call each, nobody knows which one is wrong.
    assert of_two.standing_out == {}
    assert of_four.standing_out == {1: "makes another call"}
    assert three.standing_out == dict.fromkeys((2, 3), "makes another call")
    assert explain([], ["gpu-b"]).sentence == "gpu-b did not report where its ranks are"


def test_a_call_that_others_have_not_entered_names_them(golden):
    reduce = (*START_OF_ALL, "all_reduce [4]")
    behind = parted(reduce, START_OF_ALL, reduce, START_OF_ALL)
    golden(behind.sentence, behind.advice, parted(reduce, START_OF_ALL).advice)
    assert behind.standing_out == dict.fromkeys((1, 3), "the others wait for it")


def called_at(line: int | None) -> p.GroupRecord:
    """Return calls of which the last one waits, and was made at this line of the cell."""
    calls = made(*START_OF_ALL, "all_reduce [4]", over=False)
    *before, last = calls.calls
    frames = () if line is None else (frame(CELL, line, "train", mine=True),)
    return replace(calls, calls=(*before, replace(last, frames=frames)))


def test_ranks_that_wait_for_one_call_have_their_own_lines(golden):
    at_line = {30: "x.item()", 31: "y.item()"}
    asks = {
        line: (MAIN, frame(CELL, line, "train", mine=True, text=text))
        for line, text in at_line.items()
    }
    behind = with_calls(stack(3, *LOADS), made(*START_OF_ALL))
    loads = (
        MAIN,
        frame("torch/utils/data/dataloader.py", 90, "__next__"),
    )

    def sentence(*ranks: tuple[tuple[p.Frame, ...], int | None]) -> str:
        stacks = [
            with_calls(stack(rank, *frames), called_at(line))
            for rank, (frames, line) in enumerate(ranks)
        ]
        return explained(*stacks, behind).sentence

    golden(
        sentence(
            (asks[30], 14), (asks[31], 14), (asks[31], 14)
        ),  # one sentence for all
        sentence((asks[30], 14), (asks[31], 18), (asks[31], 18)),  # from two branches
        sentence((asks[30], None), (asks[31], 18), (asks[31], 18)),
        sentence((loads, 14), (asks[31], 14), (asks[31], 14)),  # it waits for its data
    )


def test_a_rank_that_waits_later_for_its_call_is_told_with_the_line_of_the_call(golden):
    """NCCL's calls return before they are over: the stack shows where the rank waits for its GPU."""
    begun_calls = made(*START_OF_ALL, "all_reduce [4]", over=False)
    call = replace(begun_calls.calls[-1], frames=(frame(CELL, 14, "train", mine=True),))
    with_line = replace(begun_calls, calls=(*begun_calls.calls[:-1], call))
    behind = with_calls(stack(1, *LOADS), made(*START_OF_ALL))
    asks_gpu = (MAIN, frame(CELL, 30, "train", mine=True, text="x.item()"))
    found = explained(with_calls(stack(0, *asks_gpu), with_line), behind)
    without = explained(with_calls(stack(0, *asks_gpu), begun_calls), behind)
    golden(found.sentence, found.advice, without.sentence)
    assert found.awaited == {1}
    other = made(*START_OF_ALL, "broadcast [4]", over=False)
    differ = explained(
        with_calls(stack(0, *asks_gpu), with_line), with_calls(stack(1, *LOADS), other)
    )
    golden(differ.sentence)


def test_a_rank_that_has_ended_is_named(golden):
    waiting = with_calls(
        stack(0, *REDUCES), made(*START_OF_ALL, "all_reduce [4]", over=False)
    )
    left = with_calls(stack(1), made(*START_OF_ALL))
    found = explain([("gpu-a", waiting)], left=[left])
    golden(found.advice)
    assert found.awaited == {1}


def test_ranks_that_wait_together_point_at_the_network(golden):
    found = parted(*[(*START_OF_ALL, "all_reduce [4]")] * 4)
    golden(found.advice)
    silent = explained(
        with_calls(stack(0, *REDUCES), made("all_reduce [4]", over=False)),
        stack(1, silence="its process is stopped"),
    )
    assert "rank 1" in silent.advice
    assert "network" not in silent.advice


def test_a_rank_that_does_not_answer_comes_before_all(golden):
    found = explained(
        stack(0, *REDUCES), stack(1, silence="its process is stopped"), stack(2, *LOADS)
    )
    golden(found.sentence)
    assert found.advice == ""  # with rank 2 beside it, who waits for whom isn't known


def test_a_host_that_does_not_answer(golden):
    found = explained(stack(0, *REDUCES), stack(1, *REDUCES), unanswered=("gpu-b",))
    golden(found.sentence)
    assert found.advice == ""


def test_what_one_rank_does(golden):
    for frames in (
        (),
        (MAIN,),
        (*LOADS, frame("pandas/io/parsers.py", 5, "read_csv")),
        (MAIN, frame("queue.py", 1, "get"), frame("threading.py", 2, "wait")),
        (MAIN, frame("threading.py", 2, "join")),
        (MAIN, frame("subprocess.py", 2, "wait")),
        (MAIN, frame("torch/utils/data/dataloader.py", 1, "__next__"), frame("queue.py", 2, "get")),
        (MAIN, frame("torch/nn/modules/module.py", 1, "_call_impl"),
         frame("torch/nn/parallel/distributed.py", 2, "forward"), frame("torch/distributed/utils.py", 3, "_sync")),
        (MAIN, frame(C10D, 1, "_store_based_barrier")),
        (frame("importlib/__init__.py", 3, "import_module"),),
    ):  # fmt: skip
        threads = (p.Thread(frames=frames),)
        one = p.Stacks(request_id="a", rank=0, local_rank=0, threads=threads)
        golden(explained(one).sentence)


def test_ranks_that_came_another_way_are_apart():
    other = (frame(CELL, 21, "<module>", mine=True), *REDUCES[1:])
    assert len(explained(stack(0, *REDUCES), stack(1, *other)).groups) == 2


def test_many_ranks_are_told_in_ranges():
    assert explanation.listed(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"
    assert explanation.listed([*range(7), *range(8, 16), 20]) == "0-6, 8-15, 20"
    assert explanation.listed(range(0, 60, 2)).endswith("20, 22, ...")


def test_stacks_look_like_a_traceback(golden):
    found = explained(
        stack(0, *REDUCES),
        stack(1, *REDUCES),
        stack(2, *LOADS),
        stack(3, silence="why"),
    )
    golden(explanation.stacks_text(found))


def test_as_text_and_as_a_page(golden):
    hostile = (frame("<script>alert(1)</script>", 1, "\x1b[31mf", mine=True),)
    found = explained(
        stack(0, *REDUCES), stack(1, *REDUCES), stack(2, *LOADS), stack(3, *hostile)
    )
    text, page = render.stacks_text(found, "j-1"), render.stacks_html(found, "j-1")
    assert text.startswith("j-1: 4 ranks at 3 places: rank 2")
    assert "\x1b" not in text
    assert "<script>" not in page
    assert "\x1b" not in page
    assert page.count("<details open>") == 1
    assert page.count("<details>") == 2
    assert render.stacks_text(explained(), "j-1") == "j-1: no rank runs"
    golden(render.stacks_text(explained(unanswered=("gpu-a",)), "j-1"))


FRAMES = st.builds(frame, st.text(max_size=9) | st.sampled_from([C10D, "queue.py", CELL]), st.integers(0, 9), st.text(max_size=5), st.booleans(), st.text(max_size=5))  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(-5, 70), st.lists(FRAMES, max_size=4)), max_size=12)
)
def test_any_answers_give_a_sentence(answers):
    found = explained(*(stack(rank, *frames, silence="x") for rank, frames in answers))
    named = {rank for group in found.groups for rank in group.ranks}
    assert named == {rank for rank, _ in answers}
    render.stacks_html(found, "j")
    assert "\n" not in render.stacks_text(explain([], ["a"]), "j")


@given(st.lists(EVENTS, max_size=8))
def test_roll_calls_are_bounded_whatever_comes(events):
    calls = [at(p.StacksDone(request_id=f"x{i}", ranks=0), i % 2) for i in range(20)]
    state = fold(
        begun(*chain.from_iterable(events)),
        [*calls, *(at(stack(rank, *LOADS), 0) for rank in range(-1, 40))],
    )
    assert len(state.stack_dumps) <= 4
    assert all(
        rank in state.workers
        for roll in state.stack_dumps.values()
        for rank in roll.stacks
    )
    verdict(state)


# ---- asking


def answers(*nodes: int, request_id: str = "ask1") -> list[Event]:
    found = [
        at(
            stack(rank, *(LOADS if rank == 2 else REDUCES), request_id=request_id),
            rank // 2,
        )
        for rank in range(4)
        if rank // 2 in nodes
    ]
    return [
        *found,
        *(at(p.StacksDone(request_id=request_id, ranks=2), node) for node in nodes),
    ]


def driven(run: ScriptedRun, hang_timeout_s: float | None) -> RunState:
    return run.run(Limits(hang_timeout_s=hang_timeout_s))


def test_a_hang_is_explained_before_anything_is_stopped(golden):
    run = ScriptedRun(
        START,
        *[[]] * 5,
        answers(0),
        answers(1),
        [*end_of(0, -15), *end_of(1, -15)],
        step_s=1.0,
    )
    state = driven(run, 3.0)
    assert (run.asks, run.stops) == (1, [([0, 1], state.terms.grace_s, "hung")])
    error = verdict(state)
    assert isinstance(error, Hung)
    golden(error)
    (alert,) = overview(state).alerts
    assert (alert.level, alert.detail) == ("error", error.stacks)


def test_a_host_that_does_not_answer_is_waited_for_only_so_long(golden):
    run = ScriptedRun(
        START,
        *[[]] * 5,
        answers(0),
        *[[]] * 9,
        [*end_of(0, -15), *end_of(1, -15)],
        step_s=1.0,
    )
    state = driven(run, 3.0)
    assert run.asks == 1
    error = verdict(state)
    assert isinstance(error, Hung)
    golden(error)
    assert 5 + STACKS_S <= run.elapsed_s <= 8 + STACKS_S + 9


def test_no_answer_at_all(golden):
    run = ScriptedRun(START, *[[]] * 14, [*end_of(0, -15), *end_of(1, -15)], step_s=1.0)
    error = verdict(driven(run, 3.0))
    golden(error)


def test_a_rank_that_advances_while_all_are_asked_saves_the_run():
    moves = [[progress(0, at_s=1.0, step=float(i))] for i in range(8)]
    stamped = [
        [Event(node_rank=0, at_s=6.0 + i, what=one[0].what)]
        for i, one in enumerate(moves)
    ]
    ends = [*(ended(r, r // 2) for r in range(4)), *end_of(0), *end_of(1)]
    run = ScriptedRun(START, *[[]] * 4, *stamped, ends, step_s=1.0)
    state = driven(run, 3.0)
    assert (run.asks, run.stops, state.phase) == (1, [], "done")


@pytest.mark.parametrize("event", [progress, output])
def test_a_run_that_advances_is_never_asked(event):
    def move(i: int) -> Event:
        what = (
            progress(0, step=float(i)).what
            if event is progress
            else output(f"{i}\n").what
        )
        return Event(node_rank=0, at_s=float(i), what=what)

    ends = [*(ended(r, r // 2) for r in range(4)), *end_of(0), *end_of(1)]
    run = ScriptedRun(START, *([move(i)] for i in range(2, 60)), ends, step_s=1.0)
    assert (driven(run, 3.0).phase, run.asks) == ("done", 0)


def test_an_interrupt_of_a_run_that_stands_still_says_where_its_ranks_were(golden):
    still = [[]] * int(WORTH_ASKING_S + 1)
    run = ScriptedRun(
        START,
        *still,
        KeyboardInterrupt,
        answers(0, 1, request_id="ask3"),  # after two quiet questions
        [*end_of(0, -15), *end_of(1, -15)],
        step_s=1.0,
    )
    error = verdict(driven(run, None))
    assert (run.asks, [reason for _, _, reason in run.stops]) == (1, ["interrupted"])
    assert isinstance(error, Cancelled)
    golden(error)


def test_a_timeout_of_a_run_that_stands_still_says_where_its_ranks_were(golden):
    run = ScriptedRun(
        START,
        *[[]] * 9,
        answers(0),
        answers(1),
        [*end_of(0, -15), *end_of(1, -15)],
        step_s=1.0,
    )
    state = run.run(Limits(timeout_s=8.0))
    assert (run.asks, run.stops) == (1, [([0, 1], state.terms.grace_s, "timeout")])
    error = verdict(state)
    assert isinstance(error, TimedOut)
    golden(error)
    assert "more time" not in error.hint
    (alert,) = overview(state).alerts
    assert (alert.level, alert.detail) == ("error", error.stacks)


def test_a_timeout_of_a_run_that_advances_asks_nobody(golden):
    moves = [
        [Event(node_rank=0, at_s=float(i), what=progress(0, step=float(i)).what)]
        for i in range(2, 12)
    ]
    run = ScriptedRun(START, *moves, [*end_of(0, -15), *end_of(1, -15)], step_s=1.0)
    state = run.run(Limits(timeout_s=8.0))
    assert (run.asks, [reason for _, _, reason in run.stops]) == (0, ["timeout"])
    golden(verdict(state))


def test_a_timeout_while_a_hang_is_looked_into_waits_for_its_answers(golden):
    run = ScriptedRun(
        START,
        *[[]] * 6,
        [],
        answers(0, 1),
        [*end_of(0, -15), *end_of(1, -15)],
        step_s=1.0,
    )
    state = run.run(Limits(timeout_s=7.0, hang_timeout_s=5.0))
    assert (run.asks, run.stops) == (1, [([0, 1], state.terms.grace_s, "timeout")])
    golden(verdict(state))


def test_a_timeout_waits_for_answers_only_so_long(golden):
    run = ScriptedRun(START, *[[]] * 20, [*end_of(0, -15), *end_of(1, -15)], step_s=1.0)
    state = run.run(Limits(timeout_s=7.0))
    assert (run.asks, run.stops) == (1, [([0, 1], state.terms.grace_s, "timeout")])
    golden(verdict(state))


def test_answers_from_before_the_last_advance_explain_nothing():
    old = [Event(node_rank=e.node_rank, at_s=5.0, what=e.what) for e in answers(0, 1)]
    state = begun(*old, Event(node_rank=0, at_s=9.0, what=progress(0, step=1.0).what))
    assert len(state.stack_dumps) == 1
    assert hangs.explain_last(state) is None


ANSWERS = st.integers(0, 5).map(lambda rank: [at(stack(rank, *LOADS), rank // 2)])


@given(st.lists(EVENTS | ANSWERS, max_size=10))
def test_an_inquiry_ends_whatever_comes(events):
    inquiry = Inquiry()
    state = begun(*chain.from_iterable(events))
    for second in range(101, 140):
        state = fold(state, [at(None, at_s=float(second))])
        inquiry = hang_inquiry(state, inquiry, 1.0, "ask1")
        if reason_after_inquiry(state, inquiry):
            return
    assert not is_hung(state, 1.0)


def test_a_failure_is_told_rather_than_a_hang():
    state = begun(
        raised(2, 1),
        *answers(0, 1),
        at(StopRequested(reason="failed")),
        at(Lost(why="x"), 0),
        at(Lost(why="x"), 1),
    )
    assert "raised RuntimeError" in verdict(state).message
