"""The points of one metric of one rank: a value that grows in constant time and stays small. Pure.

A series that is full is thinned, but what a reader looks for is never lost: the first and the last point, the least and
the greatest value of every part, NaN and infinity.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

_COLUMNS = 4  # at_s, step, along, value; the next point's at_s, ...
_THINNED = 8  # points of which a full series keeps at most half: the least, the greatest, NaN and an infinite one


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value of a metric: seconds since the rank started, the step if the rank gave one, the value."""

    at_s: float
    step: float | None
    value: float


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Neighbouring points in one: the min, the mean and the max of their values. `x` is in steps or in seconds."""

    x: float
    low: float
    mean: float
    high: float


@dataclass(frozen=True)
class Places:
    """Where the bins of a curve lie, which all its lines share: a bin begins at its edge, and is drawn at its x."""

    edges: Sequence[float]
    xs: Sequence[float]


def places(columns: Iterable[Sequence[float]], limit: int) -> Places:
    """Return a place for each x in `columns`; of more than `limit` of them, `limit` places of the same width.

    Of these the first and the last are drawn at the first and the last x.
    """
    distinct: set[float] = set()
    ends: list[float] = []
    for column in columns:
        finite = [x for x in column if math.isfinite(x)]
        if not finite:
            continue
        ends += (min(finite), max(finite))
        if len(distinct) <= limit:
            distinct.update(finite)
    if len(distinct) <= limit:
        alone = sorted(distinct)
        return Places(alone, alone)
    left, right = min(ends), max(ends)
    width = (right - left) / limit
    edges = [left + width * index for index in range(limit)]
    xs = [edge + width / 2 for edge in edges]
    xs[0], xs[-1] = left, right
    return Places(edges, xs)


class Series:
    """Points in order of arrival. `extended` returns a longer one and leaves this one as it is.

    The numbers lie in one table that a series and its longer successors share: each sees only its own length of it,
    so that appending copies nothing, and a state that somebody holds on to never changes.
    """

    __slots__ = ("_epochs_end", "_size", "_table", "arrived")

    def __init__(
        self,
        table: array[float] | None = None,
        epochs_end: float = 0.0,
        arrived: int = 0,
    ) -> None:
        self._table = array("d") if table is None else table
        self._size = len(self._table) // _COLUMNS
        self._epochs_end = epochs_end  # where the steps of this epoch begin, counted on from all epochs before
        self.arrived = arrived  # how many points, those too that were thinned out

    def extended(self, numbers: Sequence[float], *, limit: int) -> Series:
        """Return this series and more points; one of more than `limit` points, at least 8, is thinned.

        `numbers` are at_s, step (NaN where the rank gave none) and value of the first point, of the second, and so on.
        """
        end = _COLUMNS * self._size
        table = self._table
        if len(table) != end:  # another successor has grown it already
            table = table[:end]
        epochs_end = self._epochs_end
        last_step = table[end - 3] if end else math.nan
        # All at once: a table that grows number by number takes twice as long.
        more: list[float] = []
        one_by_one = iter(numbers)
        for at_s, step, value in zip(one_by_one, one_by_one, one_by_one, strict=True):
            # Whether a step that has fallen is the beginning of a new epoch, and not one that came late.
            if step < last_step and (step <= 1 or step < last_step / 2):
                epochs_end += last_step
            if step == step:  # noqa: PLR0124 - NaN is not, and this is faster than to ask math
                last_step = step
            more += (at_s, step, epochs_end + step, value)
        table.fromlist(more)
        while len(table) > _COLUMNS * limit:
            table = _thinned(table)
        return Series(table, epochs_end, self.arrived + len(numbers) // 3)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Point:
        return self._point(range(self._size)[index])

    def xs(self, *, by_step: bool) -> array[float]:
        """Return where the points lie: at their steps, going on from epoch to epoch where a rank counts each anew.

        Without `by_step` at the seconds since the rank started.
        """
        return self._table[2 if by_step else 0 : _COLUMNS * self._size : _COLUMNS]

    def last_x(self, *, by_step: bool) -> float:
        """Return the last of them."""
        return self._table[_COLUMNS * (self._size - 1) + (2 if by_step else 0)]

    def latest(self, count: int) -> list[tuple[float, float, float]]:
        """Return at_s, the step, counted on from epoch to epoch (NaN without one), and value of the last points."""
        end = _COLUMNS * self._size
        table = self._table[max(0, end - _COLUMNS * count) : end] if count else array("d")  # fmt: skip
        at_s, along, values = (table[column::_COLUMNS] for column in (0, 2, 3))
        return list(zip(at_s, along, values, strict=True))

    def bins(
        self, places: Places, *, by_step: bool
    ) -> tuple[list[Bin], list[tuple[float, float]]]:
        """Return a bin for each place that has a finite value, and the holes.

        A hole is the first and the last x of neighbouring values that are no numbers or infinite; a place has one at most.
        """
        xs, values = self._in_order(by_step=by_step)
        found: list[Bin] = []
        holes: list[tuple[float, float]] = []
        after_hole = -1  # the index of the point after the last hole
        starts = [bisect_left(xs, edge) for edge in places.edges]
        ends = [*starts[1:], len(xs)] if starts else []
        for x, start, end in zip(places.xs, starts, ends, strict=True):
            part = values[start:end]
            if not part:
                continue
            total = sum(part)
            if math.isfinite(total):  # as nearly always
                mean = total / len(part)
                found.append(Bin(x=x, low=min(part), mean=mean, high=max(part)))
                continue
            bad = [i for i in range(start, end) if not math.isfinite(values[i])]
            if bad:
                first_x = holes.pop()[0] if bad[0] == after_hole else xs[bad[0]]
                holes.append((first_x, xs[bad[-1]]))
                after_hole = bad[-1] + 1
            finite = [value for value in part if math.isfinite(value)]
            if finite:  # each divided before: their sum may be too great
                mean = sum(value / len(finite) for value in finite)
                found.append(Bin(x=x, low=min(finite), mean=mean, high=max(finite)))
        return found, holes

    def _in_order(self, *, by_step: bool) -> tuple[array[float], array[float]]:
        """Return all x that are numbers, in order, and their values. A step may come late."""
        xs = self.xs(by_step=by_step)
        values = self._table[3 : _COLUMNS * self._size : _COLUMNS]
        if math.isfinite(sum(xs)) and sorted(xs) == xs.tolist():
            return xs, values
        pairs = [
            pair for pair in zip(xs, values, strict=True) if math.isfinite(pair[0])
        ]
        pairs.sort(key=itemgetter(0))
        return array("d", (x for x, _ in pairs)), array("d", (value for _, value in pairs))  # fmt: skip

    def _point(self, index: int) -> Point:
        start = _COLUMNS * index
        at_s, step, _, value = self._table[start : start + _COLUMNS]
        return Point(at_s=at_s, step=None if math.isnan(step) else step, value=value)

    def __iter__(self) -> Iterator[Point]:
        return map(self._point, range(self._size))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Series):
            return False
        # By their texts: NaN is not equal to itself.
        return [repr(point) for point in self] == [repr(point) for point in other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if not self._size:
            return "<Series of 0 points>"
        return f"<Series of {self._size} points, the last {self[-1]}>"


def _thinned(table: array[float]) -> array[float]:
    """Return about half of the points: of each few neighbours those that a reader looks for, and the first and the last."""
    size = len(table) // _COLUMNS
    values = table[3::_COLUMNS]
    kept: list[int] = []
    for start in range(0, size, _THINNED):
        part = values[start : start + _THINNED]
        kept += [start + index for index in _telling(part)]
    thin = array("d")
    for index in dict.fromkeys([0, *kept, size - 1]):
        thin.extend(table[_COLUMNS * index : _COLUMNS * (index + 1)])
    return thin


def _telling(part: array[float]) -> list[int]:
    """Return where the least and the greatest finite value, the first NaN and the first infinite value are, in order."""
    if math.isfinite(
        sum(part)
    ):  # as nearly always: this takes a quarter of the time of what follows
        return sorted({part.index(min(part)), part.index(max(part))})
    finite = [index for index, value in enumerate(part) if math.isfinite(value)]
    nans = [index for index, value in enumerate(part) if math.isnan(value)]
    infinite = [index for index, value in enumerate(part) if math.isinf(value)]
    places = {*nans[:1], *infinite[:1]}
    if finite:
        places.add(min(finite, key=part.__getitem__))
        places.add(max(finite, key=part.__getitem__))
    return sorted(places)
