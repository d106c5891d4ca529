"""The numbers that a page draws curves of: they agree with what was reported, and stay small."""

from __future__ import annotations

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from distmagic import render
from distmagic.comparison.metrics import metrics_of
from distmagic.render import quantities as q
from distmagic.state.model import RunState
from distmagic.state.series import Series
from tests.scenes import curve, ranks_1024, run, running, worker

VALUES = st.lists(
    st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=2, max_size=400
)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_least_greatest_and_what_is_no_number_are_those_of_the_metrics(values):
    series = Series()
    for step, value in enumerate(values):
        series = series.extended((step / 10, float(step), value), limit=2000)
    (chart,) = render.chart_data(run([worker(0)], series={0: {"x": series}}))
    finite = [value for value in values if math.isfinite(value)]
    (line,) = chart["lines"]
    assert len(line["x"]) <= 100
    if finite:
        assert math.isclose(min(line.get("low", line["mean"])), min(finite), rel_tol=1e-5)  # fmt: skip
        assert math.isclose(max(line.get("high", line["mean"])), max(finite), rel_tol=1e-5)  # fmt: skip
    assert bool(line["holes"]) == bool(chart["warning"]) == (len(finite) < len(values))
    json.dumps(chart, allow_nan=False)


@st.composite
def runs(draw: st.DrawFn, ranks: int) -> RunState:
    """A run whose ranks begin at the same step, and have come to different ones; what each reported, now and then NaN."""
    phases = st.sampled_from(["running", "stopped", "done", "failed"])
    number = st.floats(-1e3, 1e3) | st.sampled_from([math.nan, math.inf])
    every = draw(st.sampled_from([1, 2, 5]))
    workers, series = [], {}
    for rank in range(ranks):
        values = draw(st.lists(number, min_size=2, max_size=12))
        workers.append(worker(rank, phase=draw(phases)))
        stride = every if rank % 2 else 1  # some report more rarely
        points = [(float(stride * i), value) for i, value in enumerate(values)]
        series[rank] = {"loss": curve(points)}
    return run(workers, series=series)


def reported(state: RunState) -> dict[int, dict[float, float]]:
    found: dict[int, dict[float, float]] = {rank: {} for rank in state.workers}
    for row in metrics_of(state):
        found[row["rank"]][row["step"]] = row["loss"]
    return found


def same(found: list[float], wanted: list[float]) -> bool:
    return len(found) == len(wanted) and all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-5) for a, b in zip(found, wanted, strict=True))  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(runs(3))
def test_lines_and_printed_values_are_those_of_the_metrics_live_and_saved(state):
    (chart,) = render.chart_data(state)
    told = reported(state)
    lasts = [values[max(values)] for values in told.values()]
    assert chart["last"] == f"mean {q.number(sum(lasts) / 3)}"
    saved = render.curves(state)
    assert f"<span>{chart['last']}</span></figcaption>" in saved
    assert (chart["warning"] != "") == ("NaN or inf" in saved)
    for line, (rank, values) in zip(chart["lines"], told.items(), strict=True):
        finite = {x: value for x, value in values.items() if math.isfinite(value)}
        assert (line["rank"], line["x"]) == (rank, list(finite))
        assert same(line["mean"], list(finite.values()))
        assert line["last"] == q.number(values[max(values)])
        within = {x for x in values for first, last in line["holes"] if first <= x <= last}  # fmt: skip
        assert within == values.keys() - finite.keys()


def mean_at(state: RunState, x: float) -> float | None:
    """Return the mean of what the ranks have reported last up to `x`, of those that have come so far."""
    values = []
    for told in reported(state).values():
        before = [at for at in told if at <= x]
        if before and x <= max(told):
            values.append(told[max(before)])
    return sum(values) / len(values) if values else None


@settings(max_examples=60, deadline=None)
@given(runs(10))
def test_the_line_of_many_ranks_is_their_mean_up_to_where_all_have_been(state):
    (chart,) = render.chart_data(state)
    (line,) = chart["lines"]
    told = reported(state)
    ends = [max(told[rank]) for rank, one in state.workers.items() if one.phase in ("running", "stopped")]  # fmt: skip
    if ends and line["x"]:
        is_lone_point = len(line["x"]) == 1
        assert is_lone_point or max(line["x"]) <= min(ends)
    is_whole = not chart["warning"]
    if is_whole:
        wanted = [mean_at(state, x) for x in line["x"]]
        assert same(line["mean"], wanted)
        steps = {x for values in told.values() for x in values}
        assert line["x"] == sorted(x for x in steps if x <= min(ends, default=math.inf))
    assert f"<span>{chart['last']}</span></figcaption>" in render.curves(state)


def test_the_tip_of_the_mean_does_not_dive_when_one_rank_is_behind():
    """The fastest ranks alone are no mean of all."""
    workers = [worker(rank, phase="running") for rank in range(32)]
    series = {
        rank: {"loss": curve([(float(i), 1 / i + rank / 100) for i in range(1, 40 if rank == 7 else 61)])}
        for rank in range(32)
    }  # fmt: skip
    (chart,) = render.chart_data(run(workers, series=series))
    (line,) = chart["lines"]
    assert line["x"] == [float(step) for step in range(1, 40)]
    assert same(line["mean"], [1 / i + 0.155 for i in range(1, 40)])
    assert chart["last"] == f"mean {q.number(0.155 + (31 / 60 + 1 / 39) / 32)}"


def test_a_spike_is_in_it():
    points = [(float(step), 100.0 if step == 333 else 1.0) for step in range(1000)]
    (chart,) = render.chart_data(
        run([worker(0)], series={0: {"train/loss": curve(points)}})
    )
    assert (chart["name"], chart["counts_steps"]) == ("train/loss", True)
    (line,) = chart["lines"]
    assert max(line["high"]) == 100.0
    assert (line["x"][0], line["x"][-1]) == (0.0, 999.0)


def test_few_ranks_have_a_line_each_and_many_one_together():
    few = render.chart_data(running())
    assert [line["rank"] for line in few[0]["lines"]] == [0, 1, 2, 3]
    many = render.chart_data(ranks_1024())
    assert [(len(chart["lines"]), chart["ranks"]) for chart in many] == [(1, 1024)] * 2
    assert many[0]["lines"][0]["rank"] == -1


def test_many_metrics_of_many_ranks_stay_small():
    points = [(float(i), math.sin(i)) for i in range(1000)]
    metrics = {f"eval/{'&' * 200}{i}": curve(points) for i in range(40)}
    charts = render.chart_data(run([worker(r) for r in range(8)], series=dict.fromkeys(range(8), metrics)))  # fmt: skip
    assert len(charts) == 30
    assert len(json.dumps(charts)) < 250_000


def test_metrics_of_equal_printable_names_have_charts_of_their_own():
    names = ("loss", "loss\x07", "loss (2)", "loss\x1b[1m")
    metrics = {
        name: curve([(0.0, value), (1.0, value)])
        for value, name in enumerate(names, start=1)
    }
    charts = render.chart_data(run([worker(0)], series={0: metrics}))
    assert len({chart["name"] for chart in charts}) == 4
    assert [chart["last"] for chart in charts] == ["1", "2", "3", "4"]
    assert charts[0]["name"] == "loss"
