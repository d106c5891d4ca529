"""What a run looks like: golden text, the structure and bounds of the HTML, and hosts that print hostile things."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic import render
from distmagic.remote.wire.protocol import Bar, Ended, Failure, Frame, Stacks, Thread
from distmagic.render import quantities as q
from distmagic.render import text_width
from distmagic.render.output import output_lines
from distmagic.render.overview import overview
from distmagic.render.rows import state_word
from distmagic.state.model import NodeState, OutputLine, RunState, StackDump
from distmagic.state.series import Series
from tests import REPOSITORY
from tests.builders.terms import on_terms
from tests.scenes import (
    SCENES,
    curve,
    done,
    failed,
    lines,
    over,
    ranks_1024,
    run,
    running,
    standing_still,
    starting,
    unicode_names,
    waiting,
    worker,
)

GOLDEN = REPOSITORY / "tests" / "golden" / "render.txt"
TAGS = {"code", "div", "style", "span", "progress", "details", "summary", "pre", "table", "tbody", "tr", "th", "td", "b", "figure",
        "figcaption", "svg", "path"}  # fmt: skip
ATTRIBUTES = {
    "class",
    "value",
    "max",
    "colspan",
    "viewbox",
    "preserveaspectratio",
    "role",
    "tabindex",
    "aria-label",
    "style",
    "d",
}


class Page(HTMLParser):
    """Reads a page and holds it to be well-formed and harmless."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.classes: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag, attrs):
        assert tag in TAGS
        assert {name for name, _ in attrs} <= ATTRIBUTES
        self.tags.append(tag)
        self.classes += (dict(attrs).get("class") or "").split()
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


# ---- golden text


def test_text_of_every_scene_is_as_it_was():
    found = "".join(
        f"==== {name}\n{render.text(scene(), lines=4)}\n"
        for name, scene in SCENES.items()
    )
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text(encoding="utf-8"), (
        "look at the difference; GOLDEN=write pytest accepts it"
    )


@pytest.mark.parametrize("width", [40, 80, 100, 160])
@pytest.mark.parametrize("name", SCENES)
def test_no_line_but_output_is_wider_than_asked(name, width):
    assert all(
        text_width.columns_of(line) <= width
        for line in render.text(SCENES[name](), width=width, lines=0).splitlines()
    )


@pytest.mark.parametrize(("width", "height"), [(20, 1), (40, 3), (79, 10), (200, 30)])
@pytest.mark.parametrize("name", SCENES)
def test_status_fits_the_terminal(name, width, height):
    block = render.status(SCENES[name](), width=width, height=height)
    assert 1 <= len(block) <= height
    assert all(text_width.columns_of(line) <= width for line in block)


def test_status_shows_a_host_whose_ranks_have_not_begun_before_ranks_that_run():
    state = run([worker(number, per_host=1) for number in range(8)], per_host=1)
    late = NodeState(node_rank=8, host="late", phase="sending")
    state = replace(state, nodes=(*state.nodes, late))
    block = "\n".join(render.status(state, width=100, height=6))
    assert re.search(r"late +sending", block)


def test_status_of_many_ranks_shows_those_in_trouble():
    block = "\n".join(render.status(ranks_1024(), width=100, height=8))
    assert "\n   77  gpu-j" in block.replace("     77", "   77")
    assert "500" in block
    assert "more" in block


def test_milestones_tell_a_change_once():
    first = render.milestones(None, starting())
    assert first[0].startswith("starting")
    assert "torch 2.12.1" in first[1]
    assert render.milestones(starting(), starting()) == ()
    assert render.milestones(running(), replace(running(), at_s=99.0)) == ()
    assert any(
        "raised ValueError" in line for line in render.milestones(running(), failed())
    )


def test_milestones_tell_what_a_run_waits_for_and_when_another_job_has_it(golden):
    first = render.milestones(None, waiting())
    assert first[0].startswith("waiting")
    assert first[1] == f"· gpu-b: waiting for {waiting().nodes[1].waits_for}"
    a, b = waiting().nodes
    later = replace(
        waiting(),
        nodes=(a, replace(b, waits_for="device 0, held by job j since 10:09")),
    )
    assert render.milestones(waiting(), replace(waiting(), at_s=99.0)) == ()
    golden(*render.milestones(waiting(), later))
    gone = replace(
        later, abandoned="Interrupted; nothing was started.", stopping="interrupted"
    )
    assert not any("device 0" in line for line in render.text(gone).splitlines())


# ---- what is said


@pytest.mark.parametrize(("step", "rate", "is_slow"), [
    (70.0, 10.0, False),  # it began a little later
    (69.0, 10.0, True),
    (0.0, None, True),  # it has not begun at all
    (98.5, 0.2, False),  # nearly there, at whatever rate
])  # fmt: skip
def test_a_rank_that_began_a_little_later_is_not_slow(step, rate, is_slow):
    workers = [worker(rank, step=100.0, rate=10.0) for rank in range(3)]
    state = run([*workers, worker(3, step=step, rate=rate)])
    assert (overview(state).concern == "slow: rank 3 (gpu-b, local_rank 1)") == is_slow


def test_ranks_that_count_something_else_are_not_slow():
    """One has begun its second bar, or trains while others still download."""
    first = [Bar(id=1, n=80.0, total=100.0)]
    for other in (Bar(id=2, n=5.0, total=100.0), Bar(id=1, n=3e6, total=4e9, unit="B")):
        before = 1 if other.unit == "it" else 0
        workers = [worker(rank, step=None, bars=tuple(first)) for rank in range(3)]
        last = worker(3, step=None, bars=(other,), bars_before=before)
        assert overview(run([*workers, last])).concern == ""


def test_the_mean_of_the_largest_numbers_is_drawn():
    highest = {0: curve([(0.0, sys.float_info.max), (1.0, 1.0)])}
    series = {rank: {"best": highest[0]} for rank in range(12)}
    assert "best" in render.html(run([*map(worker, range(12))], series=series))


@pytest.mark.parametrize(("step", "at_s", "is_named"), [
    (500.0, 100.0, True),
    (500.0, 44.0, False),  # a tenth longer
    (500.0, 2.0, False),
    (1250.0, 100.0, False),  # it had more to do
    (50.0, 40.0, False),  # it ended with the others
])  # fmt: skip
def test_a_rank_that_was_slow_is_named_when_the_run_is_over(step, at_s, is_named):
    ended = [worker(rank, phase="done", step=500.0, at_s=40.0) for rank in range(32)]
    ended[7] = replace(ended[7], step=step, at_s=at_s)
    view = overview(over(run(ended)))
    named = "slow: rank 7 (gpu-d, local_rank 1)" if is_named else ""
    assert view.concern == named
    assert view.groups[0].title.startswith("failed and slowest: 1 of") == is_named
    if is_named:
        assert [(row.rank, state_word(row)) for row in view.groups[0].rows] == [(7, "done")]  # fmt: skip


def test_of_ranks_that_ended_without_steps_none_was_slow():
    ended = [worker(rank, phase="done", step=None, at_s=40.0 + rank) for rank in range(3)]  # fmt: skip
    assert overview(over(run(ended))).concern == ""
    short = [worker(rank, phase="done", step=1.0, at_s=0.1 + rank) for rank in range(3)]
    assert overview(over(run(short))).concern == "", "2 s are not much"


def test_at_the_end_of_a_run_the_ranks_that_still_run_are_named():
    """One that shows no progress of its own, as only rank 0 has a bar, is not hidden behind the 100 % of those that ended."""
    ended = [worker(rank, phase="done", step=500.0, rate=None) for rank in range(3)]
    late = worker(3, step=None, total=None, rate=None)
    view = overview(run([*ended, late]))
    assert (view.fraction, view.concern) == (None, "rank 3 (gpu-b, local_rank 1) still runs")  # fmt: skip
    assert "1 running, 3 done" in view.facts
    assert [row.phase for row in view.groups[0].rows] == ["done"] * 3 + ["running"]
    behind = overview(run([*ended, worker(3, step=250.0)]))
    assert (behind.fraction, behind.concern) == (0.875, "slow: rank 3 (gpu-b, local_rank 1)")  # fmt: skip
    assert overview(run([ended[0], late])).concern.startswith("rank 3 ")
    assert overview(run([ended[0], *map(worker, (1, 2, 3))])).concern == ""
    two = overview(run([*ended, late, replace(late, rank=4)]))
    assert two.concern.endswith("still runs, and 1 more")
    assert overview(over(run(ended))).concern == ""
    many = [worker(rank, phase="done", step=None) for rank in range(63)]
    first, *_ = overview(run([*many, replace(late, rank=63)])).groups
    assert [row.name for row in first.rows] == ["63"]


def test_a_rank_that_counts_from_0_has_done_all_its_steps():
    last = {"step": 499.0, "total": 500.0}
    assert overview(over(run([worker(0, phase="done", **last)]))).fraction == 1.0
    assert overview(run([worker(0, **last)])).fraction == 0.998
    early = worker(0, phase="done", step=250.0, total=500.0)
    assert overview(over(run([early]))).fraction == 0.5


@pytest.mark.parametrize(("desc", "name"), [
    ("epoch 2 iter 48: train loss 0.01974. lr 6e-4", "epoch 2 iter 48"),
    ("loss: 0.5: ", "loss: 0.5"),
    ("a name without any colon at all", "a name without any colon"),
])  # fmt: skip
def test_the_name_of_a_bar_whose_words_are_many(desc, name):
    state = run(
        [
            worker(
                0,
                step=None,
                total=None,
                bars=(Bar(id=1, desc=desc, n=45.0, total=100.0),),
            )
        ]
    )
    [group] = overview(state).groups
    assert group.rows[0].count == f"{name} 45/100"


def test_an_exception_without_words_is_its_name():
    end = Ended(rank=0, restart=0, outcome="raised", code=1, failure=Failure(type="BdbQuit", message="", traceback=""))  # fmt: skip
    [group] = overview(run([worker(0, phase="failed", ended=end)])).groups
    assert group.rows[0].note == "BdbQuit"


def test_an_interrupt_is_one_word_of_the_view():
    """The cell's error, below it, has the sentence."""
    stopped = over(run([worker(0, phase="stopped")], stopping="interrupted"), code=-15)
    for state in (stopped, replace(stopped, abandoned="Interrupted while connecting.")):
        view = overview(state)
        assert view.facts[-1] == "interrupted"
        assert view.alerts == ()
        assert render.text(state).count("nterrupted") == 1


def test_a_run_that_nobody_follows_any_more_is_grey_with_its_time():
    """After Detach, or in a document that was saved while it went on."""
    seen = replace(standing_still(), seen_unix_s=1e9)
    for state, word in ((seen, "last seen"), (replace(seen, detached_by="asked"), "detached")):  # fmt: skip
        view = overview(state)
        assert view.phase == word
        assert re.fullmatch(r"\d\d:\d\d:\d\d", view.facts[0])
        assert view.concern == ""
        rows = view.groups[0].rows
        assert {row.phase for row in rows} == {word}
        assert {row.rate + row.left for row in rows} == {""}
        page = Page(render.html(state))
        assert page.classes.count("dm-detached") == 5, "the head and the rows"
        assert not {"dm-running", "dm-stalled"} & set(page.classes)
        assert render.text(state).startswith(word)
    over = overview(replace(done(), seen_unix_s=1e9))
    assert {row.phase for row in over.groups[0].rows} == {"done"}
    crowd = overview(replace(SCENES["ranks_64"](), seen_unix_s=1e9))
    assert {row.left for group in crowd.groups for row in group.rows} == {""}


def test_ranks_that_never_began_are_counted():
    ended = Ended(rank=0, restart=0, outcome="exited", code=1)
    workers = [worker(0, phase="failed", ended=ended), worker(2, phase="stopped")]
    state = over(run(workers, world_size=4, first_failure=0, stopping="failed"), code=1)
    assert "1 failed, 1 stopped, 2 never started" in overview(state).facts
    planned = replace(state, world_size=3)
    assert "1 failed, 1 stopped, 1 never started" in overview(planned).facts
    assert not any(
        "never" in fact for fact in overview(replace(state, world_size=2)).facts
    )
    going_on = run([worker(0)], world_size=4)
    assert not any("never" in fact for fact in overview(going_on).facts)


@pytest.mark.parametrize(
    ("desc", "before", "part", "left"),
    [
        ("epoch 2/4", 1, "epoch 2 of 4", "10 s left in this bar"),
        ("Epoch [2/4]", 0, "epoch 2 of 4", "10 s left in this bar"),
        ("Fold 3 of 5: ", 2, "fold 3 of 5", "10 s left in this bar"),
        ("2/4", 1, "2 of 4", "10 s left in this bar"),
        ("Epoch 1", 1, "", "10 s left in this bar"),
        ("train", 1, "", "10 s left in this bar"),
        ("train", 0, "", "10 s left"),
        ("epoch 7/4", 0, "", "10 s left"),
        ("", 0, "", "10 s left"),
    ],
)
def test_a_bar_an_epoch_names_its_epoch_and_its_time_is_its_own(
    desc, before, part, left
):
    bar = Bar(id=2, desc=desc, n=20, total=40, rate=2.0)
    rank = worker(0, step=None, total=None, bars=(bar,), bars_before=before, rate=2.0)
    facts = overview(run([rank])).facts
    assert facts[2:] == tuple(filter(None, (part, left)))


def test_numbers_behind_a_bar_that_are_columns_are_said_once():
    bar = Bar(id=1, desc="", n=3, total=9, postfix="loss=0.245, lr=0.001, best")
    rank = worker(0, step=None, total=None, bars=(bar,), metrics={"loss": 0.245})
    (row,) = overview(run([rank])).groups[0].rows
    assert row.note == "lr=0.001, best"


def test_a_bar_that_is_over_has_no_part_in_percent_and_time():
    """As in Transformers' Trainer: rank 0 alone has a bar of the training; the others have loaded weights before."""
    over = Bar(id=1, desc="Loading weights", n=41, total=41, rate=90.0, closed=True)
    train = Bar(id=2, desc="", n=12, total=40, rate=2.0)
    ranks = [
        worker(rank, step=None, total=None, bars=(over,), rate=90.0, metrics={})
        for rank in range(4)
    ]
    ranks[0] = replace(ranks[0], bars=(train,), rate=2.0)
    state = run(ranks)
    seen = overview(state)
    assert seen.fraction == 0.3
    assert "14 s left" in seen.facts
    assert seen.concern == "", "a rank without a count is not slow"
    rows = seen.groups[0].rows
    assert [row.fraction for row in rows] == [0.3, None, None, None]
    assert [row.rate for row in rows[1:]] == [""] * 3
    assert rows[1].note == "Loading weights 41/41 is over"
    alone = overview(run(ranks[1:]))
    assert alone.fraction is None
    assert not any("left" in fact for fact in alone.facts)
    crowd = [replace(ranks[min(rank, 1)], rank=rank, local_rank=rank, node_rank=0, host="gpu-a") for rank in range(20)]  # fmt: skip
    assert "12/40" in render.text(run(crowd)), "of those that count"


def test_ranks_that_stand_still_have_no_rate_and_no_time_left(golden):
    state = replace(running(), at_s=71.0, advanced_at_s=27.0)
    text = render.text(state)
    golden(render.headline(state))
    assert "left" not in text
    assert "step/s" not in text
    assert text.count("no step for 44 s") == 4
    assert "dm-stalled" in render.html(state)


def test_the_head_says_what_is_run_and_since_when(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    state = on_terms(
        replace(running(), began_unix_s=36_000.0), call="train(lr='<0.1>')"
    )
    text = Page(render.html(state)).text
    assert "train(lr='<0.1>') · job 0612-101500-5f3a · since 10:00" in text
    later = replace(state, at_s=50_000.0)
    assert "since Jan 1, 10:00" in Page(render.html(later)).text
    attached = replace(state, before_s=50_000.0)
    assert "since Jan 1, 10:00" in Page(render.html(attached)).text
    assert "since" not in Page(render.html(running())).text


def test_stacks_that_the_user_asked_for_are_shown_while_ranks_move():
    frame = Frame(
        file="Cell In[3]", line=14, function="train", text="load()", mine=True
    )
    threads = (Thread(frames=(frame,)),)
    stacks = {
        rank: Stacks(request_id="7", rank=rank, local_rank=rank % 2, threads=threads)
        for rank in range(4)
    }
    dump = StackDump(at_s=26.0, stacks=stacks, nodes=(0, 1))
    asking = replace(running(), wanted_stacks="7")
    assert "asking every rank" in render.html(asking)
    html = render.html(replace(asking, stack_dumps={"7": dump}))
    assert "at 26 s: all 4 ranks" in html
    assert "load()" in html
    ended = replace(over(asking), stack_dumps={"7": dump})
    assert "line 14" not in render.html(ended)
    stopped = replace(ended, stopping="interrupted")
    assert "at 26 s: all 4 ranks are in train" in render.html(stopped)
    unasked = render.html(replace(stopped, wanted_stacks=""))
    assert "load()" in unasked, "also what the view has asked for by itself"


def test_the_rank_that_the_others_wait_for_is_marked():
    mine = Frame(file="Cell In[3]", line=14, function="load", text="load()", mine=True)
    waits = Frame(file="torch/distributed/distributed_c10d.py", line=9, function="all_reduce", text="work.wait()", mine=False)  # fmt: skip
    stacks = {
        rank: Stacks(request_id="1", rank=rank, local_rank=rank % 2, threads=(Thread(frames=(mine if rank == 1 else waits,)),))
        for rank in range(4)
    }  # fmt: skip
    dump = StackDump(at_s=90.0, stacks=stacks, nodes=(0, 1))
    state = replace(running(), at_s=91.0, advanced_at_s=27.0, stack_dumps={"1": dump})
    assert "Look at rank 1" in render.text(state)
    rows = overview(state).groups[0].rows
    assert [bool(row.stands_out) for row in rows] == [False, True, False, False]
    assert rows[1].note.startswith("the others wait for it")
    assert render.html(state).count('dm-awaited"') == 1


def test_one_rank_that_stands_still_is_named(golden):
    state = replace(running(), at_s=71.0, advanced_at_s=70.0)
    moving = {
        rank: replace(w, advanced_at_s=70.0)
        for rank, w in state.workers.items()
        if rank != 2
    }
    state = replace(state, workers={**state.workers, **moving})
    golden(render.headline(state))
    assert render.text(state, width=160).count("no step for 44 s") == 1
    assert " left ·" not in render.headline(state)


def test_a_failure_is_told_and_its_traceback_can_be_unfolded():
    page = Page(render.html(failed()))
    assert "rank 3 (gpu-b, local_rank 1) raised ValueError" in page.text
    assert "loss = criterion(model(x), y)" in page.text
    assert "details" in page.tags
    assert page.classes.count("dm-failed") >= 2, "the head and the row"


def test_a_lost_host_is_named_at_once_and_in_the_end():
    lost = replace(running(), lost={1: "its agent exited without an error message"})
    assert "gpu-b: its agent exited" in render.text(lost)
    assert "A host was lost" in render.text(over(lost))


def test_survivors_are_named():
    state = done()
    node = replace(state.nodes[0], survivors=("4711 python in state D",))
    assert "4711 python in state D" in render.text(
        replace(state, nodes=(node, state.nodes[1]))
    )


def test_inner_bars_are_told_and_the_outer_one_fills():
    state = SCENES["nested"]()
    page = Page(render.html(state))
    assert "batch 30/100, 4 img" in page.text
    assert "epoch 2/10" in page.text
    assert 'value="0.200"' in render.html(state)


def test_a_rank_that_ended_well_without_progress_is_whole():
    ended = Ended(rank=0, restart=0, outcome="returned")
    state = over(
        run(
            [
                worker(
                    0,
                    phase="done",
                    step=None,
                    total=None,
                    rate=None,
                    metrics={},
                    ended=ended,
                )
            ],
            series={},
        )
    )
    assert render.headline(state).startswith("done 100%")


# ---- curves


def test_holes_are_of_their_rank_and_leave_the_others_whole():
    """Rank 1 is no number twice, rank 3 once: their lines have gaps, the lines of ranks 0 and 2 none."""

    def value(rank: int, step: int) -> float:
        is_bad = (rank == 1 and step in (4, 5, 9)) or (rank == 3 and step == 8)
        return math.nan if is_bad else 1.0 / (step + rank + 1)

    series = {
        rank: {"loss": curve([(float(i), value(rank, i)) for i in range(12)])}
        for rank in range(4)
    }
    state = run([worker(rank) for rank in range(4)], series=series)
    html = render.curves(state)
    paths = re.findall(r'<path class="dm-c\d" d="([^"]+)"', html)
    assert [path.count("M") for path in paths] == [1, 3, 1, 2]
    (chart,) = render.chart_data(state)
    assert [line["holes"] for line in chart["lines"]] == [[], [[4, 5], [9, 9]], [], [[8, 8]]]  # fmt: skip
    words = "NaN or inf on rank 1 from step 4 to step 5 and at 1 more place, and on 1 more rank"
    assert chart["warning"] == words
    assert words in html


def gone_back(phase: str, *, with_steps: bool, ranks: int = 2) -> RunState:
    """A run that is over and went on from a snapshot: 50 values, then 7 from the 40th place on."""
    xs = [*map(float, range(50)), *map(float, range(40, 47))]
    numbers = [n for x in xs for n in (x, x if with_steps else math.nan, 1 / (x + 1))]
    series = {"loss": Series().extended(numbers, limit=2000)}
    workers = [worker(rank, phase=phase) for rank in range(ranks)]
    return over(run(workers, series=dict.fromkeys(range(ranks), series)))


@pytest.mark.parametrize("with_steps", [True, False])
@pytest.mark.parametrize("phase", ["done", "failed"])
def test_a_run_that_went_on_from_a_snapshot_is_shown_whole(phase, with_steps):
    state = gone_back(phase, with_steps=with_steps)
    assert "<figcaption><span><b>loss</b></span>" in render.html(state)
    (chart,) = render.chart_data(gone_back(phase, with_steps=with_steps, ranks=10))
    (line,) = chart["lines"]
    assert line["x"] == [float(x) for x in range(50)]
    assert line["mean"] == pytest.approx([1 / (x + 1) for x in range(50)], rel=1e-5)


def test_metrics_may_be_called_as_the_columns_of_a_run_are():
    points = {"progress": 17.5, "rank": 23.5, "note": 31.5, "state": 41.5}
    workers = [worker(rank, metrics=points) for rank in range(2)]
    state = run(workers)
    html = render.html(state)
    for value in points.values():
        assert html.count(f'<td class="dm-n">{value}</td>') == 2
    shown = render.text(state, width=200)
    for value in points.values():
        assert shown.count(f" {value}") == 2


@pytest.mark.parametrize(
    ("of", "is_log"),
    [
        (lambda i: 10.0 ** (-i / 50), True),  # else nearly all of it lies on the floor
        (lambda i: 1e-3 * (1.001 - i / 400), False),  # a plain schedule
        (lambda i: 1000.0 if i == 133 else 1.0 + i % 3, True),  # a spike
        (lambda i: 1.0 / (i + 1) - 0.5, False),  # values below 0
        (lambda i: 2.0 + math.exp(-i / 20), False),
    ],
)
def test_an_axis_is_the_same_in_the_page_and_in_what_is_saved(of, is_log):
    points = [(float(i), of(i)) for i in range(400)]
    state = run([worker(0)], series={0: {"x": curve(points)}})
    (chart,) = render.chart_data(state)
    assert chart["is_log"] is is_log
    (line,) = chart["lines"]
    low, high = min(line.get("low", line["mean"])), max(line.get("high", line["mean"]))
    scaled = math.log10 if is_log else float
    middle = line["mean"][50]
    part = (scaled(middle) - scaled(low)) / (scaled(high) - scaled(low))
    path = re.findall(r'<path class="dm-c0" d="([^"]+)"', render.curves(state))[0]
    drawn = [int(y) for y in re.findall(r",(\d+)", path)]
    assert abs(drawn[50] - 200 * (1 - part)) <= 1


@pytest.mark.parametrize(
    "values",
    [[1.0, 1.0], [math.inf, -math.inf], [1e308, -1e308], [math.nan] * 3, [0.0, 5e-324]],
)
def test_any_values_can_be_drawn(values):
    state = run(
        [worker(0)],
        series={0: {"x": curve([(float(i), value) for i, value in enumerate(values)])}},
    )
    Page(render.html(state))


def test_a_bar_of_tqdm_is_no_warning():
    bar = "epoch 2: 100%|##########| 938/938 [00:12<00:00, 78.1it/s, loss=0.1]"
    told = [
        OutputLine(rank=0, label="rank 0 gpu-a", stream="stderr", text=text)
        for text in (bar, "Warning: 100% of x")
    ]
    html = output_lines(run([worker(0)], lines=tuple(told), lines_seen=2))
    assert re.findall(r"dm-line (dm-\w+)", html) == ["dm-stdout", "dm-stderr"]


def test_curves_and_colours_stay_where_style_and_drawings_are_taken_away():
    """As pages do it that don't trust a notebook: no style sheet, no svg."""
    html = re.sub(r"<(style|svg).*?</\1>", "", render.html(running()), flags=re.DOTALL)
    text = Page(html).text
    assert re.search(r"loss.*[▁-█]{20,24} 2\.\d+ to 0\.\d+", text)
    assert '<span style="color:#2f7fd6">running</span>' in html
    assert "dm-spark { display: none; }" in render.style()
    rising = curve([(float(i), i * i) for i in range(9)])
    html = render.curves(run([worker(0)], series={0: {"x": rising}}))
    assert '<span class="dm-spark">▁▁▁▂▃▄▅▆█ 0 to 64</span>' in html


def test_one_point_is_no_curve():
    assert render.curves(run([worker(0)], series={0: {"x": curve([(0.0, 1.0)])}})) == ""


# ---- bounds


def test_a_large_run_is_summed_up_and_small():
    html = render.html(ranks_1024())
    assert len(html.encode()) < 200_000
    page = Page(html)
    assert "failed and slowest: 3 of 1024 ranks" in page.text
    assert "64 of 1,024 ranks" in page.text
    assert page.tags.count("tr") < 150
    assert len(render.text(ranks_1024())) < 20_000


@pytest.mark.parametrize(("count", "is_grouped"), [(16, False), (17, True), (64, True)])
def test_from_17_ranks_on_they_are_grouped_by_host(count, is_grouped, golden):
    workers = [worker(r, per_host=8) for r in range(count)]
    ended = Ended(rank=count - 1, restart=0, outcome="exited", code=1)
    workers[-1] = replace(workers[-1], phase="failed", ended=ended)
    state = run(workers, per_host=8, first_failure=count - 1)
    groups = overview(state).groups
    if not is_grouped:
        assert [len(group.rows) for group in groups] == [count]
        return
    picked, hosts, everyone = groups
    golden(picked.title)
    assert (picked.rows[0].rank, picked.rows[0].phase) == (count - 1, "failed")
    assert len(hosts.rows) == -(-count // 8)
    assert everyone.title == f"all {count} ranks"
    assert [row.rank for row in everyone.rows] == list(range(count))
    html = render.html(state)
    folded = html.index('<details class="dm-all"><summary>all ')
    assert html.index("dm-failed", html.index("<table")) < folded, "it is in sight"
    assert html[folded:].count("<tr") == count + 1
    assert "all 64 ranks" not in render.text(state), "a text has nothing to unfold"


def test_all_words_name_the_variable_that_has_the_run():
    metrics = {f"m{i}": float(i) for i in range(9)}
    points = curve([(0.0, 1.0), (1.0, 2.0)])
    state = replace(
        run([worker(0, metrics=metrics)]),
        lines=lines(400),
        lines_seen=400,
        series={0: dict.fromkeys(metrics, points)},
        variable="b",
    )
    html, text = render.html(state), render.text(state)
    assert "all: b.logs(rank), %distributed logs" in html
    assert "metrics shown; all of them: b.metrics" in html
    assert "1 more metric: b.metrics" in html
    assert "b.logs(rank)\n" in text
    assert "run." not in html.partition("</style>")[2] + text


def test_a_thousand_hosts_are_counted():
    state = run([worker(r, per_host=1) for r in range(1024)], per_host=1)
    page = Page(render.html(state))
    assert "961 more hosts" in page.text
    assert "961 running" in page.text


def test_everything_at_its_worst_is_still_bounded():
    text = "\x1b[31m&\x1b[0m" * 200
    metrics = {f"metric-{'&' * 200}{i}": 1e-300 for i in range(40)}
    points = {
        name: curve([(float(i), math.sin(i)) for i in range(1000)]) for name in metrics
    }
    failure = Failure(
        type="E" * 1000, message="&" * 10_000, traceback=("&" * 5000 + "\n") * 1000
    )
    ended = Ended(rank=0, restart=0, outcome="raised", failure=failure)
    workers = [
        worker(
            r,
            phase="failed",
            host="&" * 255,
            metrics=metrics,
            device="&" * 99,
            ended=ended,
        )
        for r in range(64)
    ]
    many = tuple(
        OutputLine(rank=1, label="&" * 300, stream="stderr", text=text)
        for _ in range(400)
    )
    notices = tuple(f"{i} {'&' * 3000}" for i in range(100))
    state = run(
        workers,
        series=dict.fromkeys(range(8), points),
        lines=many,
        lines_seen=400,
        notices=notices,
        first_failure=0,
    )
    assert len(render.html(state).encode()) < 500_000
    Page(render.html(state))


def test_only_the_last_lines_are_kept_and_the_rest_is_pointed_to():
    page = Page(render.html(replace(running(), lines=lines(400), lines_seen=400)))
    assert "last 100 of 400 lines" in page.text
    where = "run.logs(rank), %distributed logs 0612-101500-5f3a RANK"
    assert where in page.text, "in a notebook without a kernel, too"
    assert page.classes.count("dm-line") == 100


def test_stderr_and_unfinished_lines_are_told_apart():
    page = Page(render.html(unicode_names()))
    assert "dm-stderr" in page.classes
    assert "unfinished 30%" in page.text
    assert "dm-open" in page.classes


@pytest.mark.parametrize(
    ("reason", "is_waited_for"),
    [("interrupted", True), ("timeout", True), ("failed", False)],
)
def test_a_stop_that_waits_for_ranks_says_for_how_many_and_how_long(
    reason, is_waited_for
):
    workers = [worker(0), replace(worker(1), phase="done"), worker(2)]
    state = on_terms(run(workers, stopping=reason), grace_s=90.0)
    shown = " ".join(render.text(state).split())
    words = "waits up to 1 min 30 s for 2 ranks; stop again to end them now"
    assert (words in shown) == is_waited_for


# ---- hostile text

TORCHRUN = OutputLine(
    rank=-1,
    label="torchrun gpu-a",
    stream="stderr",
    text="[W socket.cpp] what torchrun says",
)
RANK = OutputLine(
    rank=0, label="rank 0 gpu-a", stream="stdout", text="what the rank says"
)


@pytest.mark.parametrize(("more", "code", "is_shown"), [
    ({}, None, False),
    ({}, 0, False),
    ({"first_failure": 0}, 1, False),
    ({"stopping": "interrupted"}, 1, False),
    ({"failed_node": 0}, 1, True),
    ({"workers": {}}, None, True),
])  # fmt: skip
def test_torchrun_is_heard_where_nobody_else_explains(more, code, is_shown):
    ended = (
        Ended(rank=0, restart=0, outcome="exited", code=1)
        if "first_failure" in more
        else None
    )
    state = run(
        [worker(0, ended=ended)], lines=(TORCHRUN, RANK), lines_seen=2, at_s=11.0
    )
    state = replace(state if code is None else over(state, code=code), **more)
    for shown in (render.text(state), render.html(state)):
        assert ("what torchrun says" in shown) == is_shown
        assert "what the rank says" in shown
    assert f"last {1 + is_shown} of {1 + is_shown} lines" in render.text(state)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("step 5\r", "step 5"), ("a\rb", "b"), ("a\rb\r\r", "b"), ("a\r  \r", "")],
)
def test_a_line_that_a_carriage_return_ends_is_shown_until_the_next_one(text, shown):
    state = run([worker(0)], open_lines={(0, 0, "stdout"): text})
    words = Page(render.open_lines(state)).text.partition("] ")[2].strip()
    assert words == shown


HOSTILE = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=40),
    st.sampled_from(["<script>alert(1)</script>", "</pre></div>", "' onload=x", '" onclick="x', "&lt;", "\x1b[31", "\x1b]0;t",
                     "a\nb", "\r", "\u202eabc", "\ud800", "\x00", "${x}", "{{x}}", "\x1b[1;31;48;5;3mx"]),
)  # fmt: skip


@given(HOSTILE, HOSTILE, HOSTILE)
def test_text_of_hosts_stays_text(one, two, three):
    failure = Failure(type=one, message=two, traceback=three)
    ended = Ended(rank=1, restart=0, outcome="raised", failure=failure, meaning=three)
    bars = (
        Bar(id=1, desc=one, n=1, unit=two),
        Bar(id=2, desc=two, n=math.nan, total=math.inf, unit=three),
    )
    workers = [worker(0, host=one, device=two, step=None, bars=bars, metrics={three: math.nan}),
               worker(1, host=two, phase="failed", ended=ended, metrics={one: math.inf, two: 1.0})]  # fmt: skip
    state = run(
        workers, job=one, first_failure=1, notices=(two,), stopping=three, lost={0: one}, unreached={0: two},
        series={0: {one: curve([(0.0, 1.0), (1.0, 2.0)])}},
        lines=(OutputLine(rank=0, label=one, stream=two, text=three), OutputLine(rank=2, label=two, stream="stderr", text=one)),
        open_lines={(0, 0, "stdout"): two, (-1, 0, "stderr"): three},
    )  # fmt: skip
    for shown in (state, over(state, code=1)):
        page = Page(render.html(shown))
        render.html(shown).encode()
        assert not any(ord(char) < 32 and char not in "\n\t" for char in page.text)
        text = render.text(shown)
        text.encode()
        assert "\x1b" not in text
        assert not any(ord(char) < 32 and char != "\n" for char in text)


@pytest.mark.parametrize(("opened_s", "is_shown"), [(None, False), (1.0, True)])
def test_a_node_that_can_not_dial_yet_is_news_once_the_lead_listens(opened_s, is_shown):
    state = run(
        [worker(0), worker(1)],
        unreached={0: "Connection refused"},
        endpoint_open_at_s=opened_s,
    )
    assert ("can't dial" in render.text(state)) == is_shown


@given(HOSTILE)
def test_a_terminal_gets_colours_and_nothing_else(text):
    shown = render.coloured(text)
    shown.encode()
    rest = text_width.ESCAPE.sub("", shown)
    assert "\x1b" not in rest
    assert "\n" not in rest
    assert shown.count("\x1b") == 0 or shown.endswith("\x1b[0m")


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m no", '<span style="color:#d9453d">red</span> no'),
        ("\x1b[1;92mok\x1b[22m on\x1b[39m no",
         '<span style="color:#2f9e57;font-weight:700">ok</span><span style="color:#2f9e57"> on</span> no'),
        ("\x1b[38;5;208mx\x1b[38;2;1;31;4mx", '<span style="color:#ff8700">x</span><span style="color:#011f04">x</span>'),
        ("\x1b[41;97mBAD\x1b[49mx", 'BAD<span style="color:#8c8c8c">x</span>'),
        ("\x1b[38;2;255;255;255;44mon blue\x1b[0m no", "on blue no"),
        ("\x1b[1;38;5;231m\x1b[48;5;31mx\x1b[39;104my", '<span style="font-weight:700">xy</span>'),
        ("\x1b[48;2;0;0;0m\x1b[31mx\x1b[49mred", 'x<span style="color:#d9453d">red</span>'),
        ("\x1b[31;48;5;999mx", '<span style="color:#d9453d">x</span>'),
        ("\x1b[38;5;999mx\x1b[38mx", "xx"),
        ("\x1b[2K\x1b[1Gover", "over"),
        ("\x1b]8;;http://x\x07link\x1b]8;;\x07", "link"),
        ("\x1b[31m<b>", '<span style="color:#d9453d">&lt;b&gt;</span>'),
    ],
)  # fmt: skip
def test_colours_become_spans(text, html):
    assert text_width.spans(text) == html


# ---- numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123456, "0.01235"), (0.0, "0"), (3e-5, "3e-05"), (12345.6, "12346"), (1.0, "1"), (1234567.0, "1.235e6"),
     (math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "-inf"), (-2.5, "-2.5"), (1e300, "1.000e300")],
)  # fmt: skip
def test_metrics_have_four_digits(value, text):
    assert q.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(5.0, "5"), (5000.0, "5000"), (50_000.0, "50,000"), (123_456.0, "123k"), (1_234_567.0, "1.23M"), (2.5e9, "2.50G"),
     (2.5, "2.5"), (1e30, "1.00e+30"), (math.nan, "NaN")],
)  # fmt: skip
def test_counts_are_short(value, text):
    assert q.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.2, "0 s"), (59.6, "1 min"), (83.0, "1 min 23 s"), (7512.0, "2 h 05 min"), (90_000.0, "1 d 1 h"), (1e12, "years"),
     (math.inf, "?"), (-1.0, "0 s")],
)  # fmt: skip
def test_durations_are_readable(value, text):
    assert q.duration(value) == text


@pytest.mark.parametrize(
    ("per_s", "text"),
    [(12.34, "12.3 it/s"), (0.25, "4 s/it"), (1234.0, "1,234 it/s"), (2.5e6, "2.50M it/s"), (0.001, "16 min 40 s/it"),
     (0.0, ""), (math.nan, ""), (-1.0, "")],
)  # fmt: skip
def test_rates_turn_around_below_one_a_second(per_s, text):
    assert q.rate(per_s, "it") == text


def test_only_what_is_whole_is_100_percent():
    assert (q.percent(0.9999), q.percent(1.0)) == ("99%", "100%")


def test_a_host_may_report_any_number():
    numbers = (math.nan, math.inf, -math.inf, -1e-300, -5.0)
    assert [q.percent(one) for one in numbers] == ["?", "100%", "0%", "0%", "0%"]


@given(st.text(max_size=30), st.integers(1, 30))
def test_cut_text_fits(text, columns):
    assert text_width.columns_of(text_width.cut(text, columns)) <= columns
    assert text_width.columns_of(text_width.cut_middle(text, columns)) <= columns


@given(st.text(max_size=80), st.integers(8, 30))
def test_wrapped_text_fits_and_nothing_is_lost(text, columns):
    found = text_width.wrapped(text, columns, "  ")
    assert all(text_width.columns_of(line) <= columns for line in found)
    assert "".join("".join(found).split()) == "".join(text.split())


def test_a_run_of_nothing_can_be_shown():
    state = RunState(job="", nodes=(NodeState(node_rank=0, host="localhost"),))
    Page(render.html(state))
    assert render.text(state).startswith("connecting · localhost · 0 s")


def test_the_time_before_this_kernel_followed_it_counts():
    assert overview(replace(done(), before_s=0.0, at_s=5.0)).facts[1] == "took 5 s"
    assert (
        overview(replace(done(), before_s=60.0, at_s=5.0)).facts[1] == "took 1 min 05 s"
    )


def test_hosts_that_do_not_hear_each_other_are_told_of_as_long_as_that_is_so():
    state = running()
    silent = replace(
        state,
        nodes=(
            state.nodes[0],
            replace(state.nodes[1], gang="silent"),
            *state.nodes[2:],
        ),
    )
    text = "gpu-b and gpu-a don't hear each other by UDP: each ends by itself if this notebook is gone"
    assert [alert.text for alert in overview(silent).alerts] == [text]
    slow = replace(
        silent, nodes=tuple(replace(node, phase="starting") for node in silent.nodes)
    )
    assert overview(slow).alerts == overview(state).alerts == ()


@pytest.mark.parametrize("phase", ["ended", "clear", "gone"])
def test_a_host_whose_job_is_over_has_ended(phase):
    node = NodeState(node_rank=0, host="gpu-a", phase=phase, code=0, reason="done")
    other = NodeState(node_rank=1, host="gpu-b", phase="running")
    shown = render.text(RunState(job="job", nodes=(node, other)))
    assert "gpu-a  ended" in shown


@pytest.mark.parametrize(
    ("reason", "note"),
    [
        *(
            (reason, "stopped")
            for reason in (
                "failed",
                "interrupted",
                "timeout",
                "rendezvous",
                "lost",
                "stopped",
            )
        ),
        *((reason, "stopped") for reason in ("hung", "gang", "abandoned")),
        ("lease", "stopped: this notebook did not renew its lease"),
        ("too late", "came too late"),
        ("another host could not start", "stopped: another host could not start"),
        ("its agent broke down: MemoryError", "its agent broke down: MemoryError"),
        ("done", ""),
    ],
)
def test_a_stopped_host_without_ranks_says_in_words_why(reason, note):
    node = NodeState(node_rank=0, host="gpu-a", phase="gone", code=-15, reason=reason)
    [group] = overview(RunState(job="job", nodes=(node,))).groups
    assert [(row.host, row.note) for row in group.rows] == [("gpu-a", note)]


def test_of_many_notices_the_newest_are_seen():
    state = run([worker(0)], notices=tuple(f"notice {i}" for i in range(20)))
    texts = [alert.text for alert in overview(state).alerts]
    assert texts == [*(f"notice {i}" for i in range(12, 20)), "and 12 more notices"]
