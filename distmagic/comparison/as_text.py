"""Several runs as a table of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distmagic.comparison.arguments import argument_columns
from distmagic.comparison.summary import RunSummary, more_is_better
from distmagic.render import quantities as q
from distmagic.render.text_width import columns_of, cut_middle, pad, plain

MAX_METRICS = 6  # with two columns each
_TITLE = 20  # columns of a metric's name


@dataclass(frozen=True, kw_only=True)
class MetricColumns:
    """What the table says of one metric, a value a run, "" for none. `best_rows` are the runs with the best of all."""

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


def metric_columns(runs: Sequence[RunSummary], name: str) -> MetricColumns:
    """Return the columns of one metric."""
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
    best_of_all = (max if is_max else min)(values.values(), default=None)
    best_rows = [row for row, value in values.items() if value == best_of_all]
    title = cut_middle(plain(name), _TITLE)
    return MetricColumns(
        title=title,
        best_title=f"{'max' if is_max else 'min'} {title}",
        lasts=tuple(lasts),
        bests=tuple(bests),
        best_rows=frozenset(best_rows if len(values) > 1 else ()),
    )


def text(runs: Sequence[RunSummary]) -> str:
    """Return the table, a row a run; the best value of each metric has a star."""
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
        metric = metric_columns(runs, name)
        columns.append([metric.title, *metric.lasts])
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
