"""The bench: its README rows, and that its sections can be run at all. What they measure is no test's business."""

from __future__ import annotations

import importlib

import pytest

from tests import REPOSITORY
from tests.bench import anatomy, table, tracing
from tests.bench.__main__ import SECTIONS
from tests.bench.figures import MetricRow, Section, Target

ROW = MetricRow(
    what="start",
    unit="s",
    ours=(1.0, 2.0, 6.0),
    against="by hand",
    theirs=(4.0, 4.0, 8.0),
    target=Target(limit=0.6),
)


def section(*rows: MetricRow) -> Section:
    return Section(
        name="start",
        title="Starting",
        rows=rows,
        when="2026-01-02 03:04",
        took_s=61.5,
        machine="2 cores",
    )


def test_every_file_of_the_bench_can_be_imported():
    """They are run by hand only; a name that was moved would be noticed late."""
    for file in (REPOSITORY / "tests" / "bench").glob("*.py"):
        if file.stem != "__main__":
            module = importlib.import_module(f"tests.bench.{file.stem}")
            assert file.stem not in SECTIONS or (
                callable(module.measure) and module.TITLE
            )


def test_the_readme_gets_four_rows_with_their_medians():
    rows = [
        MetricRow(what=what, unit="s", ours=(1.0, 2.0, 6.0), against=against)
        for what, against in table.HEADLINES
    ]
    lines = table.headlines([section(ROW, *rows)]).splitlines()
    assert len(lines) == 2 + 4
    assert lines[2] == "| first user line, cold | 2.00 s | - | ssh + torchrun by hand |"
    with pytest.raises(ValueError, match="the row first user line, cold / ssh"):
        table.headlines([section(*rows[1:])])


# As ftrace writes it: 7 is a template, 9 its child, 10 a thread of that.
TRACE = """\
            cell-5       [000] d..2.     1.000000: sched_switch: prev_comm=cell prev_pid=5 prev_prio=120 prev_state=S ==> next_comm=t next_pid=7 next_prio=120
               t-7       [000] .....     1.001000: task_newtask: pid=9 comm=t clone_flags=1200000 oom_score_adj=0
           <...>-9       [001] .....     1.002000: task_newtask: pid=10 comm=t clone_flags=3d0f00 oom_score_adj=0
          <idle>-0       [001] d..2.     1.002000: sched_switch: prev_comm=swapper/1 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=t next_pid=10 next_prio=120
               t-7       [000] d..2.     1.004000: sched_switch: prev_comm=t prev_pid=7 prev_prio=120 prev_state=S ==> next_comm=swapper/0 next_pid=0 next_prio=120
              t-10       [001] d..2.     1.006000: sched_switch: prev_comm=t prev_pid=10 prev_prio=120 prev_state=S ==> next_comm=swapper/1 next_pid=0 next_prio=120
"""


def test_every_millisecond_of_a_record_has_an_owner():
    turns, births = tracing.read(TRACE)
    owners = anatomy.grown({7: "template"}, births)
    assert owners == {7: "template", 9: "agent", 10: "agent"}
    found = tracing.shares(turns, owners, 1.0, 1.008)
    milliseconds = {owner: round(1000 * share, 3) for owner, share in found.items()}
    assert milliseconds == {"template": 3.0, "agent": 3.0, "": 2.0}
    rows = ["template", "agent"]
    drawn = tracing.drawn(turns, owners, rows, 1.0, 1.008, columns=4)
    assert drawn == ["██  ", " ██ "]


def test_the_cells_thread_is_the_views_while_it_draws():
    turn = tracing.Turn(tid=5, begin_s=1.0, end_s=2.0)
    times = [
        (part.tid == 5, part.begin_s, part.end_s)
        for part in anatomy.parts(turn, 5, [(0.5, 0.7), (1.2, 1.5), (1.9, 3.0)])
        if part.begin_s < part.end_s
    ]
    assert times == [
        (True, 1.0, 1.2),
        (False, 1.2, 1.5),
        (True, 1.5, 1.9),
        (False, 1.9, 2.0),
    ]
