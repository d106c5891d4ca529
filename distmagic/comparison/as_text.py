"""Several runs as a table of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from distmagic.comparison.arguments import arguments
from distmagic.comparison.summary import RunSummary, has_best, more_is_better
from distmagic.render import quantities as q
from distmagic.render.table import NUMBER, Column, text_lines
from distmagic.render.text_width import cut_middle, plain

MAX_METRICS = 6  # each takes two columns
_TITLE = 20  # width of a metric's name


def columns(
    runs: Sequence[RunSummary], trainings: Sequence[Sequence[int]]
) -> list[Column]:
    """Return the columns of the table. Best values are marked within each group in `trainings`."""
    metrics = names_of_metrics(runs)[:MAX_METRICS]
    notes = Column("note", [run.note for run in runs], kind="dm-note")
    return [
        Column("run", [run.label for run in runs]),
        *(Column(name, cells, kind=NUMBER) for name, cells in arguments(runs).items()),
        Column("state", [run.phase for run in runs], kind="dm-state"),
        Column("took", [q.duration(run.took_s) for run in runs]),
        Column("ranks", [str(run.ranks) for run in runs], kind=NUMBER),
        *(one for name in metrics for one in _of_metric(runs, name, trainings)),
        Column("job", [plain(run.job) for run in runs], kind="dm-faint"),
        *([notes] if any(notes.cells) else []),
    ]


def names_of_metrics(runs: Sequence[RunSummary]) -> list[str]:
    """Return the names of all metrics, in the order in which they were first reported."""
    return list(dict.fromkeys(name for run in runs for name in run.metrics))


def _of_metric(
    runs: Sequence[RunSummary], name: str, trainings: Iterable[Sequence[int]]
) -> Iterator[Column]:
    """Yield a column with the last values of a metric, and one with its best values if the metric
    has a best.
    """
    found = {row: run.metrics[name] for row, run in enumerate(runs) if name in run.metrics}  # fmt: skip
    lasts = [q.number(found[row].last) if row in found else "" for row in range(len(runs))]  # fmt: skip
    title = cut_middle(plain(name), _TITLE)
    yield Column(title, lasts, kind=NUMBER)
    if not has_best(name):
        return
    values = {row: one.best for row, one in found.items() if one.best is not None}
    pick = max if more_is_better(name) else min
    best: set[int] = set()
    for training in trainings:
        compared = {row: values[row] for row in training if row in values}
        if len(compared) > 1:
            best_here = pick(compared.values())
            best.update(row for row in compared if compared[row] == best_here)
    bests = [q.number(values[row]) if row in values else "" for row in range(len(runs))]
    title = f"{pick.__name__} {title}"
    yield Column(title, bests, kind=NUMBER, best=frozenset(best))


def text(runs: Sequence[RunSummary], trainings: Sequence[Sequence[int]]) -> str:
    """Return the table, one row for each run.

    A star marks the best value of each metric, overall or in each group.
    """
    if not runs:
        return "no runs"
    lines = text_lines(columns(runs, trainings))
    return "\n".join([*lines, *note(runs)])


def note(runs: Sequence[RunSummary]) -> list[str]:
    """Return the line below the table if it does not show all metrics."""
    count = len(names_of_metrics(runs))
    return [f"{MAX_METRICS} of {count} metrics shown"] if count > MAX_METRICS else []
