"""The numbers that a page draws curves of: they agree with what was reported, and stay small."""

from __future__ import annotations

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from distmagic import render
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
    assert len(line["x"]) <= 101
    if finite:
        assert math.isclose(min(line.get("low", line["mean"])), min(finite), rel_tol=1e-5)  # fmt: skip
        assert math.isclose(max(line.get("high", line["mean"])), max(finite), rel_tol=1e-5)  # fmt: skip
    assert bool(chart["holes"]) == (len(finite) < len(values))
    json.dumps(chart, allow_nan=False)


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
    assert max(len(chart["name"]) for chart in charts) == 60
    assert len(json.dumps(charts)) < 250_000


def test_metrics_whose_names_begin_and_end_alike_have_a_chart_each():
    """A page knows a chart by its name, and a name is cut."""
    long = ["a" * 40 + str(number) + "b" * 40 for number in range(3)]
    table = {name: curve([(0, 1.0), (1, 2.0)]) for name in long}
    charts = render.chart_data(run([worker(0)], series={0: table}))
    names = [chart["name"] for chart in charts]
    assert len(set(names)) == 3
    assert names[1] == f"{names[0]} (2)"
