"""Curves of metrics as SVG: a small chart for each metric, with a line for each rank, or mean and
band for many.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from distmagic.remote.frozen import frozen
from distmagic.render import quantities as q
from distmagic.render.rows import mean
from distmagic.render.text_width import cut_middle, plain
from distmagic.state.model import RunState
from distmagic.state.phases import ALIVE
from distmagic.state.series import Bin, mean_of, places

MAX_LINES = 8  # ranks with their own line
_MAX_CURVES = 8
_POINTS = 100  # bins of one line
_BINS = 60  # of the band of many ranks
_BAND_BINS = 20_000  # for all ranks of a band
_COLUMNS = 60  # positions at which a pointer shows values
_SPARK = 24  # characters of a curve as text
_SIGNS = "▁▂▃▄▅▆▇█"
# An axis is logarithmic if the max is so many times the min, and half of the curve is in this
# lowest part.
_LOG_FROM, _FLOOR = 100, 0.05
_WIDE, _HIGH = 800, 200  # the drawing's coordinate system


@frozen
class CurveLine:
    """The line of one rank: its bins, and the last value.

    holes  (first x, last x) of stretches that can't be drawn, such as NaN
    reach  the last x, even if its value was NaN
    """

    bins: Sequence[Bin]
    last: float
    holes: Sequence[tuple[float, float]] = ()
    reach: float = math.inf


@frozen
class Curve:
    """One metric: the line of each rank, x in steps or seconds, at places that all ranks share.

    `end` is the x that all active ranks have reached (at the stop, if the run was stopped).
    """

    name: str
    lines: Mapping[int, CurveLine]
    by_step: bool
    end: float = math.inf

    @property
    def bins(self) -> list[Bin]:
        """The bins of all ranks."""
        return [one for line in self.lines.values() for one in line.bins]

    @property
    def frame(self) -> _Frame:
        """The range of its drawing.

        The axis is logarithmic if a linear one would flatten most of the curve.
        """
        bins = self.bins
        xs = [one.x for one in bins]
        xs += [x for hole in self.all_holes for x in hole]
        low = min((one.low for one in bins), default=0.0)
        high = max((one.high for one in bins), default=0.0)
        is_log = False
        if low > 0 and high / low > _LOG_FROM:
            middle = statistics.median(one.mean for one in bins)
            is_log = _part(middle, low, high) < _FLOOR
        return _Frame(
            left=min(xs, default=0.0),
            right=max(xs, default=0.0),
            low=low,
            high=high,
            is_log=is_log,
        )

    @property
    def all_holes(self) -> list[tuple[float, float]]:
        """The holes of all ranks; overlapping ones are merged."""
        found: list[tuple[float, float]] = []
        every = (hole for line in self.lines.values() for hole in line.holes)
        for first, last in sorted(every):
            if found and first <= found[-1][1]:
                before, end = found.pop()
                found.append((before, max(end, last)))
            else:
                found.append((first, last))
        return found

    @property
    def last(self) -> float:
        """The last reported value; with several ranks, their mean."""
        return mean(line.last for line in self.lines.values()) or 0.0

    @property
    def last_words(self) -> str:
        """The last reported value as text."""
        word = "mean " if len(self.lines) > 1 else ""
        return f"{word}{q.number(self.last)}"

    @property
    def warning(self) -> str:
        """Which rank has values that can't be drawn, and where they start; "" for none."""
        bad = {rank: line.holes for rank, line in self.lines.items() if line.holes}
        if not bad:
            return ""
        rank = min(bad, key=lambda rank: bad[rank][0])
        (first, last), *more = bad[rank]
        where = f"at {x_words(first, self)}"
        if last > first:
            where = f"from {x_words(first, self)} to {x_words(last, self)}"
        if more:
            where += f" and at {q.plural(len(more), 'more place')}"
        others = (
            f", and on {q.plural(len(bad) - 1, 'more rank')}" if len(bad) > 1 else ""
        )
        return f"NaN or inf on rank {rank} {where}{others}"


@frozen
class _Frame:
    """The range of a drawing."""

    left: float
    right: float
    low: float
    high: float
    is_log: bool

    def x(self, value: float) -> int:
        """Return the x coordinate of `value` in the drawing."""
        return round(_WIDE * _part(value, self.left, self.right))

    def y(self, value: float) -> int:
        """Return the y coordinate of `value` in the drawing; smaller is higher."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return round(_HIGH * (1 - _part(value, low, high)))


def palette(rank: int) -> str:
    """Return the CSS class of a rank's colour; equal local ranks on different hosts differ too."""
    if rank < 0:
        return "dm-c"
    colour = (rank + rank // MAX_LINES) % MAX_LINES
    return f"dm-c{colour}"


def names_of_curves(state: RunState) -> list[str]:
    """Return the metrics that were reported more than once, in the order of their first report."""
    tables = state.series.values()
    found = (name for table in tables for name, series in table.items() if len(series) > 1)  # fmt: skip
    return list(dict.fromkeys(found))


def curves(state: RunState, *, with_values: bool = False) -> str:
    """Return a chart for each metric, and the legend; "" if no metric was reported twice.

    `with_values`: a pointer over a chart shows the values at that point.
    """
    names = names_of_curves(state)
    if not names:
        return ""
    shown = [curve_of(state, name) for name in names[:_MAX_CURVES]]
    figures = ""
    for curve in shown:
        warning = f' <b class="dm-bad">{curve.warning}</b>' if curve.warning else ""
        metric = escape(cut_middle(plain(curve.name), 40))
        caption = (
            f"<span><b>{metric}</b>{warning}</span> <span>{curve.last_words}</span>"
        )
        spark = sparkline(joined(curve))
        names_of_lines = {}
        if with_values:
            names_of_lines = {rank: f"rank {rank}" for rank in curve.lines}
        figures += figure(curve, caption, spark, names_of_lines)
    ranks = sorted({rank for curve in shown for rank in curve.lines})
    if len(ranks) > MAX_LINES:
        legend = f'<b class="dm-c0">mean of {len(ranks)} ranks</b><span class="dm-faint">band: lowest to highest</span>'
    else:
        legend = " ".join(
            f'<b class="{palette(rank)}">rank {rank}</b>' for rank in ranks
        )
    more = len(names) - len(shown)
    if more:
        legend += f'<span class="dm-faint">and {q.plural(more, "more metric")}: {state.variable}.metrics</span>'
    return (
        f'<div class="dm-curves">{figures}</div><div class="dm-legend">{legend}</div>'
    )


def curve_of(state: RunState, name: str, points: int = _POINTS) -> Curve:
    """Return the curve of one metric, with at most `points` bins a rank."""
    tables = {rank: state.series[rank][name] for rank in sorted(state.series) if state.series[rank].get(name)}  # fmt: skip
    limit = points
    if len(tables) > MAX_LINES:
        limit = max(10, min(_BINS, points, _BAND_BINS // len(tables)))
    by_step = all(
        line[-1].step is not None and line[0].step is not None
        for line in tables.values()
    )
    where = places((line.xs(by_step=by_step) for line in tables.values()), limit)
    lines = {}
    at_work = []
    for rank, series in tables.items():
        bins, holes = series.bins(where, by_step=by_step)
        last = series[-1].value
        ends = [other.last_x(by_step=by_step) for other in state.series[rank].values() if other]  # fmt: skip
        reach = max(filter(math.isfinite, ends), default=0.0)
        worker = state.workers.get(rank)
        if worker is not None and worker.phase in (*ALIVE, "stopped"):
            at_work.append(reach)
        if bins and not math.isfinite(last):
            reach = bins[-1].x
        lines[rank] = CurveLine(bins=bins, last=last, holes=holes, reach=reach)
    end = min(at_work, default=math.inf)
    return Curve(name=name, by_step=by_step, lines=lines, end=end)


def _part(value: float, low: float, high: float) -> float:
    """Return the position of `value` between `low` and `high`, 0 to 1."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return 0.5
    return (value - low) / span


# ---- one figure


def figure(
    curve: Curve,
    caption: str,
    spark: str,
    names: Mapping[int, str],
    *,
    most_lines: int = MAX_LINES,
) -> str:
    """Return the drawing of a curve; `caption` is HTML.

    `spark` is the curve as text, for pages that remove drawings; the style sheet hides it. If lines
    have `names`, a pointer over the drawing shows their values. Above `most_lines`, they are drawn
    as their mean, with a band.
    """
    frame = curve.frame
    paths: list[str] = []
    if len(curve.lines) > most_lines:
        paths += _line_and_band(joined(curve), frame, "dm-c0")
    else:
        for rank, line in curve.lines.items():
            paths += _line_and_band(line, frame, palette(rank))
    marks = "".join(
        f"M{frame.x(first)},24V0H{frame.x(last)}v24" for first, last in curve.all_holes
    )
    if marks:  # a bracket at the top for each hole
        paths.append(f'<path class="dm-nan" d="{marks}"/>')
    if names:
        paths += _values(curve, frame, names)
    name = escape(cut_middle(plain(curve.name), 40), quote=True)
    label = f"{name}: {q.number(frame.low)} to {q.number(frame.high)}, last {curve.last_words}"
    drawing = f'<svg viewBox="0 0 {_WIDE} {_HIGH}" preserveAspectRatio="none" role="img" aria-label="{label}">{"".join(paths)}</svg>'
    top = bottom = ""
    if curve.bins:
        top, bottom = q.number(frame.high), q.number(frame.low)
    left, right = x_words(frame.left, curve), x_words(frame.right, curve)
    y_axis = f'<div class="dm-axis dm-y"><span>{top} </span><span>{bottom}</span></div>'
    x_axis = f'<div class="dm-axis dm-x"><span>{left} </span><span>{right}</span></div>'
    spark = f'<span class="dm-spark">{spark}</span>'
    return f'<figure class="dm-curve"><figcaption>{caption}</figcaption>{spark}{y_axis}{drawing}{x_axis}</figure>'


def _values(curve: Curve, frame: _Frame, names: Mapping[int, str]) -> Iterable[str]:
    """Yield columns over a drawing, each with the values of the lines that cover it."""
    xs = sorted({one.x for one in curve.bins})
    for x in xs[:: -(-len(xs) // _COLUMNS) or 1]:
        words = [x_words(x, curve)]
        for rank, line in curve.lines.items():
            bins = line.bins
            if bins and bins[0].x <= x <= bins[-1].x:
                near = min(bins, key=lambda one: abs(one.x - x))
                words.append(f"{names[rank]}: {q.number(near.mean)}")
        left = frame.x(x) - _WIDE // _COLUMNS // 2
        title = "&#10;".join(map(escape, words))
        yield f'<g class="dm-at"><title>{title}</title><rect x="{left}" width="{_WIDE // _COLUMNS}" height="{_HIGH}"/></g>'


def sparkline(line: CurveLine) -> str:
    """Return a line as text characters, with its first value and the last one; "" for none."""
    if not line.bins:
        return ""
    stride = -(-len(line.bins) // _SPARK)
    means = [one.mean for one in line.bins[::stride]]
    low, high = min(means), max(means)
    signs = [
        _SIGNS[round(_part(value, low, high) * (len(_SIGNS) - 1))] for value in means
    ]
    return f"{''.join(signs)} {q.number(means[0])} to {q.number(line.last)}"


def x_words(value: float, curve: Curve) -> str:
    """Return an x of a curve as text."""
    if curve.by_step:
        return f"step {q.count(round(value))}"  # a bin may be between two
    return q.duration(value)


def joined(curve: Curve) -> CurveLine:
    """Return mean, min and max of all ranks at each place as one line without holes, up to the
    curve's end.

    A rank without a report at a place counts with its previous value, up to its last report; not if
    that is NaN.
    """
    all_xs = sorted({one.x for one in curve.bins})
    xs = [x for x in all_xs if x <= curve.end] or all_xs[:1]
    members: dict[float, list[Bin]] = {x: [] for x in xs}
    for line in curve.lines.values():
        bins = {one.x: one for one in line.bins}
        latest: Bin | None = None
        for x in xs:
            latest = bins.get(x, latest)
            if latest is None:
                continue
            # Its bins after its reach count too: it went back to a snapshot.
            if x in bins or (x <= line.reach and not _has_hole(line, x, x)):
                members[x].append(latest)
    found = []
    for x, here in members.items():
        _, lows, means, highs = zip(*here, strict=True)
        found.append(Bin(x=x, low=min(lows), mean=mean_of(means), high=max(highs)))
    return CurveLine(bins=found, last=curve.last)


def _line_and_band(line: CurveLine, frame: _Frame, color: str) -> Iterable[str]:
    """Yield a band if it is wider than the line, then the line, with gaps at the holes."""
    if any(frame.y(one.low) != frame.y(one.high) for one in line.bins):
        upper = [f"{frame.x(one.x)},{frame.y(one.high)}" for one in line.bins]
        lower = [f"{frame.x(one.x)},{frame.y(one.low)}" for one in reversed(line.bins)]
        yield f'<path class="dm-band {color}" d="M{"L".join(upper + lower)}Z"/>'
    path = ""
    before_x = math.inf
    for one in line.bins:
        point = f"{frame.x(one.x)},{frame.y(one.mean)}"
        has_gap = before_x == math.inf or _has_hole(line, before_x, one.x)
        # h0, a line of length zero, shows a single point.
        path += f"M{point}h0" if has_gap else f"L{point}"
        before_x = one.x
    if path:
        yield f'<path class="{color}" d="{path}"/>'


def _has_hole(line: CurveLine, left: float, right: float) -> bool:
    """Whether a value between two x is NaN or infinite."""
    return any(first <= right and last >= left for first, last in line.holes)
