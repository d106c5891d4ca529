"""Several runs as a table of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distmagic.comparison.arguments import argument_columns
from distmagic.comparison.summary import RunSummary, has_best, more_is_better
from distmagic.render import quantities as q
from distmagic.render.text_width import columns_of, cut_middle, pad, plain

MAX_METRICS = 6  # with two columns each
_TITLE = 20  # columns of a metric's name


@dataclass(frozen=True, kw_only=True)
class MetricColumns:
    """What the table says of one metric, a value a run, "" for none. `best_rows` are the runs with the best of all.

    `best_title` is "" where no value can be the best one.
    """

    title: str
    best_title: str
    lasts: tuple[str, ...]
    bests: tuple[str, ...]
    best_rows: frozenset[int]


def names_of_metrics(runs: Sequence[RunSummary]) -> list[str]:
    """Return the metrics of all runs, in the order in which they were reported."""
    names: dict[str, None] = {}
    for run in runs:
        names.update(dict.fromkeys(metric.name for metric in run.metrics))
    return list(names)


def metric_columns(
    runs: Sequence[RunSummary], name: str, trainings: Iterable[Sequence[int]]
) -> MetricColumns:
    """Return the columns of one metric; the best values are those among the runs of each training."""
    lasts, bests = [], []
    values: dict[int, float] = {}
    for row, run in enumerate(runs):
        last = best = ""
        for metric in run.metrics:
            if metric.name == name:
                last = q.number(metric.last)
                if metric.best is not None:
                    best = q.number(metric.best)
                    values[row] = metric.best
        lasts.append(last)
        bests.append(best)
    is_max = more_is_better(name)
    best_rows: set[int] = set()
    for training in trainings:
        compared = [row for row in training if row in values]
        best_here = (max if is_max else min)((values[row] for row in compared), default=None)  # fmt: skip
        if len(compared) > 1:
            best_rows.update(row for row in compared if values[row] == best_here)
    title = cut_middle(plain(name), _TITLE)
    return MetricColumns(
        title=title,
        best_title=f"{'max' if is_max else 'min'} {title}" if has_best(name) else "",
        lasts=tuple(lasts),
        bests=tuple(bests),
        best_rows=frozenset(best_rows),
    )


def text(runs: Sequence[RunSummary], trainings: Sequence[Sequence[int]] = ()) -> str:
    """Return the table, a row a run; the best value of each metric has a star, of all runs or of each training."""
    if not runs:
        return "no runs"
    names = names_of_metrics(runs)
    columns = [
        ["run", *(run.label for run in runs)],
        *([one.title, *one.values] for one in argument_columns(runs)),
        ["state", *(run.phase for run in runs)],
        ["took", *(q.duration(run.took_s) for run in runs)],
        ["ranks", *(str(run.ranks) for run in runs)],
    ]
    for name in names[:MAX_METRICS]:
        metric = metric_columns(runs, name, trainings or [range(len(runs))])
        columns.append([metric.title, *metric.lasts])
        if not metric.best_title:
            continue
        best = [metric.best_title]
        for row, value in enumerate(metric.bests):
            best.append(f"{value} *" if row in metric.best_rows else value)
        columns.append(best)
    columns.append(["job", *(plain(run.job) for run in runs)])
    widths = [max(columns_of(cell) for cell in column) for column in columns]
    lines = []
    for row in range(len(runs) + 1):
        cells = [
            pad(column[row], width)
            for column, width in zip(columns, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    if len(names) > MAX_METRICS:
        lines.append(f"{MAX_METRICS} of {len(names)} metrics shown")
    return "\n".join(lines)
