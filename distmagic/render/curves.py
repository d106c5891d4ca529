"""Curves of the metrics as SVG: small multiples, a line a rank, or mean and band where ranks are many."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from distmagic.render import quantities as q
from distmagic.render.rows import mean
from distmagic.render.text_width import cut_middle, plain
from distmagic.state.model import RunState
from distmagic.state.series import Bin

MAX_LINES = 8  # ranks with a line of their own
_MAX_CURVES = 8
_POINTS = 100  # bins of one line
_BINS = 60  # of the band of many ranks
_BAND_BINS = 20_000  # of all ranks together, that a band is made of
_SPARK = 24  # signs of a curve in text
_SIGNS = "▁▂▃▄▅▆▇█"
_MAX_MARKS = 20  # of places with NaN
_WIDE, _HIGH = 800, 200  # of the drawing's own units


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric: the bins of each rank, x in steps or seconds. `holes` are the x of values that can't be drawn."""

    name: str
    lines: Mapping[int, Sequence[Bin]]
    lasts: Sequence[float]
    by_step: bool
    holes: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """The range of a drawing."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> int:
        """Return where `value` lies, in the drawing's units."""
        return round(_WIDE * _part(value, self.left, self.right))

    def y(self, value: float) -> int:
        """Return where `value` lies, in the drawing's units; up is less."""
        return round(_HIGH * (1 - _part(value, self.low, self.high)))


def palette(rank: int) -> str:
    """Return the class of a rank's colour; ranks of the same place on different hosts differ too."""
    if rank < 0:
        return "dm-c"
    colour = (rank + rank // MAX_LINES) % MAX_LINES
    return f"dm-c{colour}"


def names_of_curves(state: RunState) -> list[str]:
    """Return the metrics that were reported more than once, in the order in which ranks reported them."""
    names: dict[str, None] = {}
    for table in state.series.values():
        for name, series in table.items():
            if len(series) > 1:
                names[name] = None
    return list(names)


def curves(state: RunState) -> str:
    """Return a figure for each metric, and the legend; "" where nothing was reported twice."""
    names = names_of_curves(state)
    if not names:
        return ""
    shown = [curve_of(state, name) for name in names[:_MAX_CURVES]]
    figures = "".join(figure(curve, _caption(curve), _spark(curve)) for curve in shown)
    ranks = sorted({rank for curve in shown for rank in curve.lines})
    if len(ranks) > MAX_LINES:
        legend = f'<b class="dm-c0">mean of {len(ranks)} ranks</b><span class="dm-faint">band: lowest to highest</span>'
    else:
        legend = " ".join(
            f'<b class="{palette(rank)}">rank {rank}</b>' for rank in ranks
        )
    more = len(names) - len(shown)
    if more:
        legend += f'<span class="dm-faint">and {more} more metrics: {state.variable}.metrics</span>'
    return (
        f'<div class="dm-curves">{figures}</div><div class="dm-legend">{legend}</div>'
    )


def curve_of(state: RunState, name: str, points: int = _POINTS) -> Curve:
    """Return the curve of one metric, with at most about `points` bins a rank."""
    tables = {}
    for rank in sorted(state.series):
        series = state.series[rank].get(name)
        if series:
            tables[rank] = series
    limit = points
    if len(tables) > MAX_LINES:
        limit = max(10, min(_BINS, points, _BAND_BINS // len(tables)))
    by_step = all(
        line[-1].step is not None and line[0].step is not None
        for line in tables.values()
    )
    lines, holes = {}, []
    for rank, series in tables.items():
        lines[rank], more_holes = series.bins(limit, by_step=by_step)
        holes += more_holes
    lasts = [series[-1].value for series in tables.values()]
    return Curve(
        name=name, by_step=by_step, lines=lines, lasts=lasts, holes=sorted(holes)
    )


def _part(value: float, low: float, high: float) -> float:
    """Return where `value` lies between `low` and `high`, 0 to 1."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return 0.5
    return (value - low) / span


# ---- one figure


def figure(
    curve: Curve, caption: str, spark: str, *, most_lines: int = MAX_LINES
) -> str:
    """Return the drawing of a curve; `caption` is HTML, `spark` stands for the drawing where that is taken away.

    More than `most_lines` are drawn as their mean, with a band.
    """
    bins = [one for line in curve.lines.values() for one in line]
    xs = [one.x for one in bins]
    xs += curve.holes
    frame = _Frame(
        left=min(xs, default=0.0),
        right=max(xs, default=0.0),
        low=min((one.low for one in bins), default=0.0),
        high=max((one.high for one in bins), default=0.0),
    )
    if len(curve.lines) > most_lines:
        paths = _line_and_band(joined(curve), (), frame, "dm-c0")
    else:
        paths = _lines(curve, frame)
    inner = "".join(paths) + _marks(curve, frame)
    name = escape(cut_middle(plain(curve.name), 40), quote=True)
    last = q.number(mean(curve.lasts) or 0.0)
    label = f"{name}: {q.number(frame.low)} to {q.number(frame.high)}, last {last}"
    drawing = f'<svg viewBox="0 0 {_WIDE} {_HIGH}" preserveAspectRatio="none" role="img" aria-label="{label}">{inner}</svg>'
    top = q.number(frame.high) if bins else ""
    bottom = q.number(frame.low) if bins else ""
    left, right = _x_words(frame.left, curve), _x_words(frame.right, curve)
    y_axis = f'<div class="dm-axis dm-y"><span>{top} </span><span>{bottom}</span></div>'
    x_axis = f'<div class="dm-axis dm-x"><span>{left} </span><span>{right}</span></div>'
    spark = f'<span class="dm-spark">{spark}</span>'
    return f'<figure class="dm-curve"><figcaption>{caption}</figcaption>{spark}{y_axis}{drawing}{x_axis}</figure>'


def _spark(curve: Curve) -> str:
    """Return the curve in text, for pages from which drawings are taken away; the style sheet hides it."""
    line = next(iter(curve.lines.values()), ())
    if len(curve.lines) > 1:
        line = _means(curve, line)
    return sparkline(line)


def sparkline(line: Sequence[Bin]) -> str:
    """Return a line as signs of text, with its first and its last value; "" for none."""
    if not line:
        return ""
    stride = -(-len(line) // _SPARK)
    means = [one.mean for one in line[::stride]]
    low, high = min(means), max(means)
    signs = [
        _SIGNS[round(_part(value, low, high) * (len(_SIGNS) - 1))] for value in means
    ]
    return f"{''.join(signs)} {q.number(line[0].mean)} to {q.number(line[-1].mean)}"


def _means(curve: Curve, like: Sequence[Bin]) -> list[Bin]:
    """Return the bins of the first rank with the means of all ranks at the same places."""
    found = []
    for index, one in enumerate(like):
        values = [
            line[index].mean for line in curve.lines.values() if index < len(line)
        ]
        found.append(replace(one, mean=sum(values) / len(values)))
    return found


def _caption(curve: Curve) -> str:
    word = "mean " if len(curve.lasts) > 1 else ""
    warning = ""
    if curve.holes:
        first = _x_words(curve.holes[0], curve)
        warning = f' <b class="dm-bad">NaN or inf from {first}</b>'
    name = escape(cut_middle(plain(curve.name), 40))
    value = q.number(mean(curve.lasts) or 0.0)
    return f"<span><b>{name}</b>{warning}</span> <span>{word}{value}</span>"


def _x_words(value: float, curve: Curve) -> str:
    if curve.by_step:
        return f"step {q.count(round(value))}"  # a bin stands at the mean of its steps
    return q.duration(value)


def _lines(curve: Curve, frame: _Frame) -> Iterable[str]:
    """Yield of each rank the line of its means and, where a bin has several values, the band around it."""
    for rank, line in curve.lines.items():
        yield from _line_and_band(line, curve.holes, frame, palette(rank))


def joined(curve: Curve) -> list[Bin]:
    """Return the means, the least and the greatest values of all ranks together, in `_BINS` steps."""
    xs = [one.x for line in curve.lines.values() for one in line]
    left, right = min(xs, default=0.0), max(xs, default=0.0)
    table: dict[int, list[Bin]] = {}
    place_of: dict[float, int] = {}  # ranks share most of their steps
    for line in curve.lines.values():
        for one in line:
            if one.x not in place_of:
                part = _part(one.x, left, right)
                place_of[one.x] = min(_BINS - 1, int(part * _BINS))
            table.setdefault(place_of[one.x], []).append(one)
    found = []
    for place, members in sorted(table.items()):
        x = left + (place + 0.5) / _BINS * (right - left)
        low = min(one.low for one in members)
        high = max(one.high for one in members)
        found.append(
            Bin(
                x=x,
                low=low,
                mean=sum(one.mean for one in members) / len(members),
                high=high,
            )
        )
    return found


def _line_and_band(
    line: Sequence[Bin], holes: Sequence[float], frame: _Frame, color: str
) -> Iterable[str]:
    """Yield a band where it is any wider than the line, then the line, with gaps at the holes."""
    if any(frame.y(one.low) != frame.y(one.high) for one in line):
        upper = [f"{frame.x(one.x)},{frame.y(one.high)}" for one in line]
        lower = [f"{frame.x(one.x)},{frame.y(one.low)}" for one in reversed(line)]
        yield f'<path class="dm-band {color}" d="M{"L".join(upper + lower)}Z"/>'
    path = _path(line, holes, frame)
    if path:
        yield f'<path class="{color}" d="{path}"/>'


def _path(line: Sequence[Bin], holes: Sequence[float], frame: _Frame) -> str:
    """Return a path with gaps where a value is no number; a lone point becomes a dot."""
    parts: list[str] = []
    before_x = math.inf
    for one in line:
        point = f"{frame.x(one.x)},{frame.y(one.mean)}"
        first_hole = bisect.bisect(holes, before_x)
        has_gap = first_hole < len(holes) and holes[first_hole] < one.x
        # h0, a line of no length, shows where no other point follows.
        parts.append(f"L{point}" if before_x < one.x and not has_gap else f"M{point}h0")
        before_x = one.x
    return "".join(parts)


def _marks(curve: Curve, frame: _Frame) -> str:
    places = sorted({frame.x(x) for x in curve.holes})
    path = "".join(f"M{x},0v24" for x in places[:_MAX_MARKS])
    return f'<path class="dm-nan" d="{path}"/>' if path else ""
