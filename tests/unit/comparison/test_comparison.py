"""Several runs side by side: labels, last and best values, the table as text and HTML, and what a kernel keeps of its runs."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html import escape
from types import SimpleNamespace

import pytest

import distmagic
from distmagic.comparison.arguments import arguments
from distmagic.comparison.compare import Comparison, RunHistory
from distmagic.comparison.summary import has_best, more_is_better, summary
from distmagic.errors import UsageError, WorkerFailed
from distmagic.outcome.run import Run
from distmagic.state.model import RunState
from distmagic.state.series import Series
from tests.builders.terms import on_terms
from tests.scenes import curve, done, failed, over, run, running, worker


def run_of(call: str, *losses: float, acc: float = 0.5, **more: object) -> RunState:
    """Return a run of one rank that is over."""
    series = {
        "loss": curve([(float(step), value) for step, value in enumerate(losses)]),
        "val/acc": curve([(0.0, acc), (1.0, acc / 2)]),
    }
    state = on_terms(
        over(run([worker(0, phase="done")], series={0: series})), call=call
    )
    return replace(state, job=f"job-{call}", **more)


SLOW = run_of("train(lr=0.1)", 3.0, 1.0, 2.0, acc=0.4)
FAST = run_of("train(lr=0.2)", 3.0, 0.5, 0.75, acc=0.3)


def table_of(*states: RunState) -> list[list[str]]:
    rows = repr(Comparison([summary(state) for state in states])).splitlines()
    return [re.split(r" {2,}", row) for row in rows]


def test_a_row_a_run_with_the_last_and_the_best_value_of_each_metric():
    titles, first, second = table_of(SLOW, FAST)
    assert titles == [
        "run", "lr", "state", "took", "ranks", "loss", "min loss", "val/acc", "max val/acc", "job",
    ]  # fmt: skip
    assert first == [
        "train(lr=0.1)", "0.1", "done", "27 s", "1", "2", "1", "0.2", "0.4 *", "job-train(lr=0.1)",
    ]  # fmt: skip
    assert second[5:9] == ["0.75", "0.5 *", "0.15", "0.3"]


@pytest.mark.parametrize(
    ("calls", "columns"),
    [
        (["fit(50, lr=0.1)", "fit(50, lr=0.2)"], {"lr": ("0.1", "0.2")}),
        (["fit(50)", "fit(60, 'a')"], {"argument 1": ("50", "60"), "argument 2": ("", "'a'")}),
        (["train.py 5 --lr 0.1 --amp", "train.py 5 --lr=0.2"], {"lr": ("0.1", "0.2"), "amp": ("yes", "")}),
        (["train.py --lr -1", "train.py --lr 1"], {"lr": ("-1", "1")}),
        (["fit(**config)", "fit(*a, lr=1)", "not 'closed"], {"argument 1": ("", "*a", ""), "lr": ("", "1", "")}),
        (["fit(1)", "fit(1)"], {}),
        (["-m pkg.train 5", "-m pkg.train 6"], {"argument 1": ("5", "6")}),
        (["fit", "the whole cell"], {}),
    ],
)  # fmt: skip
def test_arguments_that_differ_are_columns(calls, columns):
    runs = [summary(on_terms(replace(SLOW, name="same"), call=call)) for call in calls]
    assert {name: tuple(values) for name, values in arguments(runs).items()} == columns
    for title, values in columns.items():
        for text in (title, *values):
            assert escape(text) in Comparison(runs)._repr_html_()
            assert text in repr(Comparison(runs))


def test_runs_of_different_trainings_have_axes_of_their_own():
    calls = ["train(lr=0.1)", "tune(3)", "train.py --lr 1", "train(lr=0.2)", "train.py 5", "-m pkg 1", "-m pkg 2", "loss = fit(1)"]  # fmt: skip
    runs = [summary(on_terms(SLOW, call=call)) for call in calls]
    apart = Comparison(runs, is_apart=True)._repr_html_()
    legends = re.findall(r'dm-legend">(.*?)</div>', apart)
    assert [len(re.findall("<b ", legend)) for legend in legends] == [2, 1, 2, 2, 1]
    assert apart.count("<b>loss</b>") == 5
    assert Comparison(runs)._repr_html_().count("<b>loss</b>") == 1
    bests = [row.count("*") for row in repr(Comparison(runs, is_apart=True)).splitlines()]  # fmt: skip
    assert bests == [0, 2, 0, 2, 2, 2, 2, 2, 0], "each among runs of its own training"


def test_no_learning_rate_is_the_best():
    table = {name: curve([(0.0, 1.0), (1.0, 2.0)]) for name in ("lr", "train/grad_norm", "loss")}  # fmt: skip
    state = replace(SLOW, series={0: table})
    titles, *_ = table_of(state, state)
    assert titles[-5:] == ["lr", "train/grad_norm", "loss", "min loss", "job"]
    page = Comparison([summary(state)])._repr_html_()
    assert page.count("<th") == 9
    assert page.count("<td") == 9


def test_a_pointer_over_a_curve_shows_the_values_of_all_runs():
    html = Comparison([summary(SLOW), summary(FAST)])._repr_html_()
    titles = re.findall(r"<title>(.*?)</title>", html)
    assert "step 0&#10;train(lr=0.1): 3&#10;train(lr=0.2): 3" in titles
    assert "step 1&#10;train(lr=0.1): 1&#10;train(lr=0.2): 0.5" in titles


def test_a_run_is_called_by_its_name_else_by_its_call_else_by_its_job():
    assert summary(replace(SLOW, name="wide")).label == "wide"
    assert summary(SLOW).label == "train(lr=0.1)"
    assert summary(on_terms(SLOW, call="")).label == "job-train(lr=0.1)"
    assert summary(replace(SLOW, name="\x1b]0;x\x07a\nb")).label.isprintable()


@pytest.mark.parametrize(
    ("name", "is_so"),
    [("loss", False), ("val_acc", True), ("eval/F1", True), ("top1", True), ("accumulated", False), ("map50-map", True),
     ("trainAcc", True), ("F1Score", True), ("miou", True), ("map50", True), ("tokens_per_sec", True), ("valLoss", False),
     ("success_rate", True), ("error_rate", False), ("perplexity", False),
     ("accuracy_loss", False), ("mAP", True), ("val/mAP50", True), ("IoU", True), ("mIoU", True), ("seconds_per_token", False), ("step_loss", False)],
)  # fmt: skip
def test_the_name_of_a_metric_says_which_value_is_the_best(name, is_so):
    assert more_is_better(name) is is_so
    assert has_best(name)


@pytest.mark.parametrize("name", ["lr", "grad_norm", "epoch", "learning_rate", "globalStep", "loss_scale"])  # fmt: skip
def test_a_schedule_or_a_magnitude_has_no_best_value(name):
    assert not has_best(name)


def test_of_several_ranks_the_last_value_is_the_mean_and_the_best_that_of_any():
    state = done()  # four ranks
    loss = summary(state).metrics["loss"]
    lasts = [table["loss"][-1].value for table in state.series.values()]
    lowest = min(p.value for table in state.series.values() for p in table["loss"])
    assert math.isclose(loss.last, sum(lasts) / 4)
    assert math.isclose(loss.best, lowest)
    assert loss.by_step
    assert 10 < len(loss.bins) <= 61


def test_of_very_many_ranks_all_count_for_the_last_value_and_some_for_the_curve():
    one = SLOW.series[0]
    large = curve([(0.0, 100.0), (1.0, 90.0)])
    series = dict.fromkeys(range(1000), one) | {1000: {"loss": large}}
    loss = summary(replace(SLOW, series=series)).metrics["loss"]
    assert math.isclose(loss.last, (1000 * 2.0 + 90.0) / 1001)
    assert loss.best == 1.0
    assert len(loss.bins) <= 61


def test_runs_without_a_metric_or_without_a_number_have_gaps():
    silent = on_terms(replace(SLOW, series={}, job="silent"), call="other()")
    broken = run_of("broken()", math.nan, math.nan)
    titles, *rows = table_of(silent, broken, SLOW)
    assert titles[5:7] == ["loss", "min loss"]
    text = repr(Comparison([summary(one) for one in (silent, broken, SLOW)]))
    assert "NaN" in text
    assert "1 *" not in text, "there is nothing that it is better than"
    assert len(rows) == 3
    assert repr(Comparison([])) == "no runs"


def test_the_html_has_a_line_a_run_in_each_figure_and_needs_nothing_else():
    html = distmagic.compare(Run(SLOW, {}, None, shown=False), SimpleNamespace(state=FAST))._repr_html_()  # type: ignore[arg-type]  # fmt: skip
    figures = re.findall(r"<figure.*?</figure>", html)
    assert [re.search(r"<figcaption><b>(.*?)</b>", one)[1] for one in figures] == [
        "loss",
        "val/acc",
    ]
    assert re.findall(r'<path class="(dm-c\d)" d="M', figures[0]) == ["dm-c0", "dm-c1"]
    assert "train(lr=0.1) █▁▅ 3 to 2<br>train(lr=0.2) █▁▂ 3 to 0.75" in html, "in text"
    assert '<b class="dm-c1">train(lr=0.2)</b>' in html
    assert '<b>0.5</b><span class="dm-star"> *</span>' in html
    assert not re.search(r"<script|src=|href=", html)
    assert len(html) < 40_000


def test_an_axis_of_steps_has_whole_numbers():
    html = distmagic.compare(SimpleNamespace(state=done()))._repr_html_()
    assert re.findall(r"<span>step ([^< ]+)", html) == ["0", "308"] * 2


def test_labels_are_escaped():
    assert "<b>x" not in distmagic.compare(
        SimpleNamespace(state=on_terms(SLOW, call="f('<b>x')"))
    )._repr_html_().replace("&lt;b&gt;x", "")


def test_ten_runs_have_ten_lines():
    runs = [on_terms(replace(SLOW, job=f"j{n}"), call=f"f({n})") for n in range(10)]
    html = Comparison([summary(state) for state in runs])._repr_html_()
    figure = re.search(r"<figure.*?</figure>", html)[0]
    assert len(re.findall(r'<path class="dm-c\d" d="M', figure)) == 10


def test_what_is_no_run_is_refused(golden):
    with golden.raises(UsageError):
        distmagic.compare({0: 1})


def test_a_kernel_keeps_the_last_fifty_runs_each_once():
    history = RunHistory()
    for number in range(60):
        history.add(replace(SLOW, job=f"j{number}"))
    history.add(replace(FAST, job="j20"))
    assert [run.job for run in history.runs] == [
        *(f"j{n}" for n in range(10, 20)), *(f"j{n}" for n in range(21, 60)), "j20",
    ]  # fmt: skip


@pytest.mark.parametrize("with_steps", [True, False])
@pytest.mark.parametrize("phase", ["done", "failed"])
def test_a_kernel_keeps_a_run_that_went_on_from_a_snapshot(phase, with_steps):
    xs = [*map(float, range(50)), *map(float, range(40, 47))]
    numbers = [n for x in xs for n in (x, x if with_steps else math.nan, 100 - x)]
    series = {0: {"loss": Series().extended(numbers, limit=2000)}}
    history = RunHistory()
    history.add(over(run([worker(0, phase=phase)], series=series)))
    (kept,) = history.runs
    (loss,) = kept.metrics.values()
    assert [one.x for one in loss.bins] == [float(x) for x in range(50)]


@pytest.mark.promise("`compare` puts any runs side by side")
def test_runs_side_by_side():
    """One that is over, one that failed, as its error has it, and one that goes on, each of other metrics."""
    went_well = Run(FAST, {}, None, shown=False)  # type: ignore[arg-type]
    error = WorkerFailed("rank 3 failed.")
    error.run = Run(failed(), {}, None, shown=False)  # type: ignore[arg-type]
    runs = (went_well, error.run, SimpleNamespace(state=running()))
    compared = distmagic.compare(*runs)
    titles, *rows = (re.split(r" {2,}", row) for row in repr(compared).splitlines())
    assert titles[1] == "lr", "which one of them has"
    states = [row[2 if row[1] == "0.2" else 1] for row in rows]
    assert states == ["done", "failed", "running"]
    assert {"loss", "val/acc"} <= set(titles)
    html = compared._repr_html_()
    (loss,) = re.findall(r"<figure.*?<b>loss</b>.*?</figure>", html, re.DOTALL)[:1]
    lines = set(re.findall(r'<path class="(dm-c\d)', loss))
    assert lines == {"dm-c0", "dm-c1", "dm-c2"}, "their curves over each other"


def test_runs_that_failed_or_go_on_are_compared_as_far_as_they_are():
    _, *rows = table_of(failed(), running())
    assert [row[1] for row in rows] == ["failed", "running"]
