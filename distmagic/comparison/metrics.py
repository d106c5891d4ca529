"""The metrics that ranks of a run have reported, as rows and as curves. Pure."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.render import style
from distmagic.render.curves import (
    curve_of,
    curves,
    joined,
    names_of_curves,
    sparkline,
)
from distmagic.render.text_width import plain
from distmagic.state.model import RunState


class Metrics(list[dict[str, float | int | None]]):
    """The rows of `Run.metrics`."""

    def frame(self) -> Any:
        """Return them as a pandas DataFrame. Raises `UsageError` if pandas is not installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ModuleNotFoundError:
            raise UsageError(
                "pandas is not installed on the notebook machine.",
                "%pip install pandas",
            ) from None
        return pandas.DataFrame(list(self))


def metrics_of(state: RunState) -> Metrics:
    """Return the rows of `Run.metrics`.

    A restarted rank counts its seconds from 0 again: its later rows come last.
    """
    rows: dict[tuple[int, float, int, float | None], dict[str, float | int | None]] = {}
    for rank, table in state.series.items():
        # Each restart is seen in the metric with the most points. What was reported together is one
        # row.
        restarts_at: dict[tuple[float, float | None], int] = {}
        by_length = sorted(table.items(), key=lambda one: -len(one[1]))
        for name, series in by_length:
            column = f"{name}_" if name in ("rank", "at_s") else name
            restarts, before_s = 0, 0.0
            for point in series:
                restarts += point.at_s < before_s
                before_s = point.at_s
                place = (point.at_s, point.step)
                restarts = restarts_at.setdefault(place, restarts)
                key = (restarts, point.at_s, rank, point.step)
                rows.setdefault(
                    key, {"rank": rank, "at_s": point.at_s, "step": point.step}
                )[column] = point.value
    return Metrics(rows[key] for key in sorted(rows, key=itemgetter(0, 1, 2)))


@frozen
class Plot:
    """Curves of some metrics of a run."""

    state: RunState  # without the run's other metrics

    def __repr__(self) -> str:
        lines = []
        for name in names_of_curves(self.state):
            curve = curve_of(self.state, name)
            lines.append(f"{plain(name)}  {sparkline(joined(curve))}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f'<div class="distmagic">{style()}{curves(self.state, with_values=True)}</div>'


def plot_of(state: RunState, names: Sequence[str]) -> Plot:
    """Return the curves of these metrics, or of all.

    Raises `UsageError` for a metric that no rank has reported at least twice.
    """
    known = names_of_curves(state)
    for name in names:
        if name not in known:
            raise UsageError(
                f"No rank has reported {name!r} twice.",
                f"Reported more than once: {', '.join(known) or 'nothing'}.",
            )
    wanted = names or known
    series = {
        rank: {name: table[name] for name in wanted if name in table}
        for rank, table in state.series.items()
    }
    return Plot(state=replace(state, series=series))
