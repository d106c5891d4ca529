"""The numbers of the curves for a page that draws them itself: bounded, rounded, ready for JSON."""

from __future__ import annotations

from collections.abc import Sequence

from distmagic.render import quantities as q
from distmagic.render.curves import (
    MAX_LINES,
    CurveLine,
    curve_of,
    joined,
    names_of_curves,
)
from distmagic.render.text_width import plain
from distmagic.state.model import RunState

_MAX_CHARTS = 30
# Limits for the bins of all curves, and for one line.
_POINTS_OF_ALL = 4000
_FEWEST_POINTS, _MOST_POINTS = 16, 100


def chart_data(state: RunState) -> list[dict[str, object]]:
    """Return name and lines of each metric that was reported more than once.

    A page identifies a chart by its name: if several metrics have the same printable name, later
    ones get a number. A line has the rank (-1: all ranks together, if they are many), and the x,
    min, mean and max of each bin. It also has the first and last x of each hole, and the last value
    as text. If a metric `counts_steps`, x is in steps, else in seconds.
    """
    names = names_of_curves(state)[:_MAX_CHARTS]
    lines_in_all = len(names) * min(MAX_LINES, max(1, len(state.series)))
    points = _POINTS_OF_ALL // max(1, lines_in_all)
    points = max(_FEWEST_POINTS, min(_MOST_POINTS, points))
    charts: dict[str, dict[str, object]] = {}
    for name in names:
        shown, number = plain(name), 1
        while shown in charts:
            number += 1
            shown = f"{plain(name)} ({number})"
        curve = curve_of(state, name, points)
        if len(curve.lines) > MAX_LINES:
            lines = [_line(-1, joined(curve), curve.all_holes, curve.last_words)]
        else:
            lines = [
                _line(rank, line, line.holes, q.number(line.last))
                for rank, line in curve.lines.items()
            ]
        charts[shown] = {
            "name": shown,
            "counts_steps": curve.by_step,
            "is_log": curve.frame.is_log,
            "ranks": len(curve.lines),
            "lines": lines,
            "last": curve.last_words,
            "warning": curve.warning,
        }
    return list(charts.values())


def _line(
    rank: int, drawn: CurveLine, holes: Sequence[tuple[float, float]], last: str
) -> dict[str, object]:
    bins = drawn.bins
    line: dict[str, object] = {
        "rank": rank,
        "x": [_rounded(one.x) for one in bins],
        "mean": [_rounded(one.mean) for one in bins],
        "holes": [[_rounded(x) for x in hole] for hole in holes],
        "last": last,
    }
    if any(one.low != one.high for one in bins):
        line["low"] = [_rounded(one.low) for one in bins]
        line["high"] = [_rounded(one.high) for one in bins]
    return line


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
