"""Curves of the metrics as SVG: small multiples, a line a rank, or mean and band where ranks are many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from distmagic.render import quantities as q
from distmagic.render.rows import mean
from distmagic.render.text_width import cut_middle, plain
from distmagic.state.model import RunState
from distmagic.state.series import Series

MAX_LINES = 8  # ranks with a line of their own
_MAX_CURVES = 8
_POINTS = 100  # of one line
_BINS = 60  # of a band
_BAND_POINTS = 20_000  # that a band is made of
_MAX_MARKS = 20  # of places with NaN
_WIDE, _HIGH = 800, 200  # of the drawing's own units
_HUGE = 1e300

XY = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """One metric: points of each rank as (x, value), x in steps or seconds; values may be NaN or infinite.

    `points` are all that can be drawn, `holes` the x of those that can't.
    """

    name: str
    lines: Mapping[int, Sequence[XY]]
    by_step: bool
    points: Sequence[XY]
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


def curves(state: RunState) -> str:
    """Return a figure for each metric, and the legend; "" where nothing was reported twice."""
    names: dict[str, None] = {}  # in the order in which ranks reported them
    for table in state.series.values():
        for name, series in table.items():
            if len(series) > 1:
                names[name] = None
    if not names:
        return ""
    shown = [_curve(state, name) for name in list(names)[:_MAX_CURVES]]
    figures = "".join(_figure(curve) for curve in shown)
    legend = _legend(shown)
    more = len(names) - len(shown)
    if more:
        legend += f'<span class="dm-faint">and {more} more metrics: run.metrics</span>'
    return f'<div class="dm-curves">{figures}</div><div class="dm-legend">{legend}</div>'


def _curve(state: RunState, name: str) -> _Curve:
    tables = {}
    for rank in sorted(state.series):
        series = state.series[rank].get(name)
        if series:
            tables[rank] = series
    limit = _POINTS
    if len(tables) > MAX_LINES:
        limit = max(10, min(_BINS, _BAND_POINTS // len(tables)))
    by_step = all(line[-1].step is not None and line[0].step is not None for line in tables.values())
    lines = {rank: _thin(line, limit, by_step=by_step) for rank, line in tables.items()}
    points, holes = [], []
    for line in lines.values():
        for x, y in line:
            if y - y == 0:  # finite, and four times as fast as to ask math
                points.append((x, y))
            else:
                holes.append(x)
    return _Curve(name=name, by_step=by_step, lines=lines, points=points, holes=sorted(holes))


def _thin(series: Series, limit: int, *, by_step: bool) -> list[XY]:
    """Return about `limit` points, the last one among them."""
    at_s, steps, values = series.every(-(-len(series) // limit))
    thin = []
    for at, step, value in zip(at_s, steps, values, strict=True):
        x = at
        if by_step and not math.isnan(step):
            x = step
        if not math.isfinite(x):
            continue
        if -_HUGE <= x <= _HUGE and -_HUGE <= value <= _HUGE:  # nearly always, and there are very many
            thin.append((x, value))
        else:
            thin.append((_bound(x), _bound(value)))
    return thin


def _bound(value: float) -> float:
    """Return `value` within the range of what can be drawn; NaN and infinite ones stay as they are."""
    if -_HUGE <= value <= _HUGE or not math.isfinite(value):
        return value
    return _HUGE if value > 0 else -_HUGE


def _part(value: float, low: float, high: float) -> float:
    """Return where `value` lies between `low` and `high`, 0 to 1."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return 0.5
    return (value - low) / span


# ---- one figure


def _figure(curve: _Curve) -> str:
    xs = [x for x, _ in curve.points]
    xs += curve.holes
    ys = [y for _, y in curve.points]
    frame = _Frame(
        left=min(xs, default=0.0),
        right=max(xs, default=0.0),
        low=min(ys, default=0.0),
        high=max(ys, default=0.0),
    )
    paths = _band(curve, frame) if len(curve.lines) > MAX_LINES else _lines(curve, frame)
    inner = "".join(paths) + _marks(curve, frame)
    drawing = f'<svg viewBox="0 0 {_WIDE} {_HIGH}" preserveAspectRatio="none" role="img">{inner}</svg>'
    top = q.number(frame.high) if ys else ""
    bottom = q.number(frame.low) if ys else ""
    left, right = _x_words(frame.left, curve), _x_words(frame.right, curve)
    y_axis = f'<div class="dm-axis dm-y"><span>{top} </span><span>{bottom}</span></div>'
    x_axis = f'<div class="dm-axis dm-x"><span>{left} </span><span>{right}</span></div>'
    return f'<figure class="dm-curve"><figcaption>{_caption(curve)}</figcaption>{y_axis}{drawing}{x_axis}</figure>'


def _caption(curve: _Curve) -> str:
    lasts = [line[-1][1] for line in curve.lines.values() if line]
    word = "mean " if len(lasts) > 1 else ""
    warning = ""
    if curve.holes:
        first = _x_words(curve.holes[0], curve)
        warning = f' <b class="dm-bad">NaN or inf from {first}</b>'
    name = escape(cut_middle(plain(curve.name), 40))
    value = q.number(mean(lasts) or 0.0)
    return f"<span><b>{name}</b>{warning}</span> <span>{word}{value}</span>"


def _x_words(value: float, curve: _Curve) -> str:
    if curve.by_step:
        return f"step {q.count(value)}"
    return q.duration(value)


def _lines(curve: _Curve, frame: _Frame) -> Iterable[str]:
    for rank, line in curve.lines.items():
        path = _path(line, frame)
        if path:
            yield f'<path class="{palette(rank)}" d="{path}"/>'


def _path(line: Sequence[XY], frame: _Frame) -> str:
    """Return a path with gaps where a value is no number; a lone point becomes a dot."""
    parts: list[str] = []
    is_drawing = False
    for x, y in line:
        if not math.isfinite(y):
            is_drawing = False
            continue
        point = f"{frame.x(x)},{frame.y(y)}"
        # h0, a line of no length, shows where no other point follows.
        parts.append(f"L{point}" if is_drawing else f"M{point}h0")
        is_drawing = True
    return "".join(parts)


def _band(curve: _Curve, frame: _Frame) -> Iterable[str]:
    """Yield the band from the lowest to the highest value of all ranks, and the line of their means, in `_BINS` steps."""
    bins: dict[int, list[float]] = {}
    bin_of: dict[float, int] = {}  # ranks share most of their steps
    for x, y in curve.points:
        if x not in bin_of:
            part = _part(x, frame.left, frame.right)
            bin_of[x] = min(_BINS - 1, int(part * _BINS))
        bins.setdefault(bin_of[x], []).append(y)
    if not bins:
        return
    upper, middle, lower = [], [], []
    for i, values in sorted(bins.items()):
        x = round(_WIDE * (i + 0.5) / _BINS)
        upper.append(f"{x},{frame.y(max(values))}")
        middle.append(f"{x},{frame.y(sum(values) / len(values))}")
        lower.append(f"{x},{frame.y(min(values))}")
    outline = upper + lower[::-1]
    yield f'<path class="dm-band dm-c0" d="M{"L".join(outline)}Z"/>'
    yield f'<path class="dm-c0" d="M{"L".join(middle)}"/>'


def _marks(curve: _Curve, frame: _Frame) -> str:
    places = sorted({frame.x(x) for x in curve.holes})
    path = "".join(f"M{x},0v24" for x in places[:_MAX_MARKS])
    return f'<path class="dm-nan" d="{path}"/>' if path else ""


def _legend(shown: Sequence[_Curve]) -> str:
    ranks = sorted({rank for curve in shown for rank in curve.lines})
    if len(ranks) > MAX_LINES:
        return f'<b class="dm-c0">mean of {len(ranks)} ranks</b><span class="dm-faint">band: lowest to highest</span>'
    return " ".join(f'<b class="{palette(rank)}">rank {rank}</b>' for rank in ranks)
