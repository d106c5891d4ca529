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
    return f"dm-c{(rank + rank // MAX_LINES) % MAX_LINES}" if rank >= 0 else "dm-c"


def curves(state: RunState) -> str:
    """Return a figure for each metric, and the legend; "" where nothing was reported twice."""
    tables = state.series.values()
    names = [*dict.fromkeys(name for table in tables for name, series in table.items() if len(series) > 1)]
    if not names:
        return ""
    shown = [_curve(state, name) for name in names[:_MAX_CURVES]]
    more = len(names) - len(shown)
    rest = f'<span class="dm-faint">and {more} more metrics: run.metrics</span>' if more else ""
    figures = "".join(_figure(curve) for curve in shown)
    return f'<div class="dm-curves">{figures}</div><div class="dm-legend">{_legend(shown)}{rest}</div>'


def _curve(state: RunState, name: str) -> _Curve:
    series = {rank: state.series[rank][name] for rank in sorted(state.series) if name in state.series[rank]}
    limit = _POINTS if len(series) <= MAX_LINES else max(10, min(_BINS, _BAND_POINTS // len(series)))
    by_step = all(line[-1].step is not None and line[0].step is not None for line in series.values() if line)
    lines = {rank: _thin(line, limit, by_step=by_step) for rank, line in series.items() if line}
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
    if by_step:
        pairs = zip(
            (at if math.isnan(step) else step for at, step in zip(at_s, steps, strict=True)), values, strict=True
        )
    else:
        pairs = zip(at_s, values, strict=True)
    return [
        (x, y) if -_HUGE <= x <= _HUGE and -_HUGE <= y <= _HUGE else (_bound(x), _bound(y))
        for x, y in pairs
        if math.isfinite(x)
    ]


def _bound(value: float) -> float:
    return max(-_HUGE, min(_HUGE, value)) if math.isfinite(value) else value


def _part(value: float, low: float, high: float) -> float:
    span = high - low
    return 0.5 if span <= 0 or not math.isfinite(span) else (value - low) / span


# ---- one figure


def _figure(curve: _Curve) -> str:
    xs = [x for x, _ in curve.points]
    xs += curve.holes
    ys = [y for _, y in curve.points]
    frame = _Frame(
        left=min(xs, default=0.0), right=max(xs, default=0.0), low=min(ys, default=0.0), high=max(ys, default=0.0)
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
    warning = f' <b class="dm-bad">NaN or inf from {_x_words(curve.holes[0], curve)}</b>' if curve.holes else ""
    name = escape(cut_middle(plain(curve.name), 40))
    return f"<span><b>{name}</b>{warning}</span> <span>{word}{q.number(mean(lasts) or 0.0)}</span>"


def _x_words(value: float, curve: _Curve) -> str:
    return f"step {q.count(value)}" if curve.by_step else q.duration(value)


def _lines(curve: _Curve, frame: _Frame) -> Iterable[str]:
    for rank, line in curve.lines.items():
        path = _path(line, frame)
        if path:
            yield f'<path class="{palette(rank)}" d="{path}"/>'


def _path(line: Sequence[XY], frame: _Frame) -> str:
    """Return a path with gaps where a value is no number; a lone point becomes a dot."""
    parts: list[str] = []
    pen = "M"
    for x, y in line:
        if math.isfinite(y):
            parts.append(f"{pen}{frame.x(x)},{frame.y(y)}{'h0' if pen == 'M' else ''}")
        pen = "L" if math.isfinite(y) else "M"
    return "".join(parts)


def _band(curve: _Curve, frame: _Frame) -> Iterable[str]:
    """Yield the band from the lowest to the highest value of all ranks, and the line of their means, in `_BINS` steps."""
    bins: dict[int, list[float]] = {}
    bin_of: dict[float, int] = {}  # ranks share most of their steps
    for x, y in curve.points:
        if x not in bin_of:
            bin_of[x] = min(_BINS - 1, int(_part(x, frame.left, frame.right) * _BINS))
        bins.setdefault(bin_of[x], []).append(y)
    at = [(round(_WIDE * (i + 0.5) / _BINS), values) for i, values in sorted(bins.items())]
    if not at:
        return
    upper = [f"{x},{frame.y(max(values))}" for x, values in at]
    lower = [f"{x},{frame.y(min(values))}" for x, values in reversed(at)]
    yield f'<path class="dm-band dm-c0" d="M{"L".join(upper + lower)}Z"/>'
    middle = "L".join(f"{x},{frame.y(mean(values) or 0.0)}" for x, values in at)
    yield f'<path class="dm-c0" d="M{middle}"/>'


def _marks(curve: _Curve, frame: _Frame) -> str:
    places = sorted({frame.x(x) for x in curve.holes})
    path = "".join(f"M{x},0v24" for x in places[:_MAX_MARKS])
    return f'<path class="dm-nan" d="{path}"/>' if path else ""


def _legend(shown: Sequence[_Curve]) -> str:
    ranks = sorted({rank for curve in shown for rank in curve.lines})
    if len(ranks) > MAX_LINES:
        return f'<b class="dm-c0">mean of {len(ranks)} ranks</b><span class="dm-faint">band: lowest to highest</span>'
    return " ".join(f'<b class="{palette(rank)}">rank {rank}</b>' for rank in ranks)
