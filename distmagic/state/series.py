"""The points of one metric of one rank.

Adding a point takes constant time, and the memory is limited. Pure.

A full series is thinned. It keeps the first and the last point, and of every part the min, the max,
a NaN and an infinite value.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from distmagic.payload.sizes import plural
from distmagic.remote.frozen import frozen

_COLUMNS = 4  # at_s, step, along, value; the next point's at_s, ...
# a full series keeps at most half of each such group of points: its min, its max, a NaN and an
# infinite one
_THINNED = 8


@frozen
class Point:
    """One value of a metric, with seconds since the start of the rank, and the step if the rank
    gave one.
    """

    at_s: float
    step: float | None
    value: float


class Bin(NamedTuple):
    """Several neighbouring points as one: the min, mean and max of their values.

    `x` is in steps or in seconds.
    """

    x: float
    low: float
    mean: float
    high: float


@dataclass(frozen=True)
class Places:
    """The positions of a curve's bins, which all its lines share: a bin starts at its edge, and is
    drawn at its x.
    """

    edges: Sequence[float]
    xs: Sequence[float]


def places(columns: Iterable[Sequence[float]], limit: int) -> Places:
    """Return a place for each x in `columns`; if these are more than `limit`, return `limit` places
    of the same width.

    The first and the last of these are drawn at the first and the last x.
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
    """Points in order of arrival. `extended` returns a longer series and leaves this one unchanged.

    The numbers are in one table that a series shares with its longer successors: each uses only its
    own length of it. So appending copies nothing, and an older state never changes.
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
        # where the steps of this epoch start, added up over all earlier epochs
        self._epochs_end = epochs_end
        # Number of points so far, including those that were thinned out.
        self.arrived = arrived

    def extended(
        self, numbers: Sequence[float], *, limit: int, has_restarted: bool = False
    ) -> Series:
        """Return this series with more points; above `limit` points (at least 8) it is thinned.

        `numbers` are at_s, step (NaN if the rank gave none) and value of the first point, of the
        second, and so on. `has_restarted`: the rank may go on from a snapshot, so a smaller step
        begins no epoch.
        """
        end = _COLUMNS * self._size
        table = self._table
        if len(table) != end:  # another successor has already extended it
            table = table[:end]
        epochs_end = self._epochs_end
        last_step = table[end - 3] if end and not has_restarted else math.nan
        # All at once: appending number by number takes twice as long.
        more: list[float] = []
        one_by_one = iter(numbers)
        for at_s, step, value in zip(one_by_one, one_by_one, one_by_one, strict=True):
            # Whether a smaller step is the start of a new epoch, and not a late one.
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
        """Return the x of all points: their steps, counted on across epochs if a rank starts each
        at 0.

        Without `by_step`, seconds since the start of the rank.
        """
        return self._table[2 if by_step else 0 : _COLUMNS * self._size : _COLUMNS]

    def last_x(self, *, by_step: bool) -> float:
        """Return the x of the last point."""
        return self._table[_COLUMNS * (self._size - 1) + (2 if by_step else 0)]

    def latest(self, count: int) -> list[tuple[float, float, float]]:
        """Return at_s, step and value of the last points.

        Steps are counted on across epochs (NaN without one).
        """
        end = _COLUMNS * self._size
        table = self._table[max(0, end - _COLUMNS * count) : end] if count else array("d")  # fmt: skip
        at_s, along, values = (table[column::_COLUMNS] for column in (0, 2, 3))
        return list(zip(at_s, along, values, strict=True))

    def bins(
        self, places: Places, *, by_step: bool
    ) -> tuple[list[Bin], list[tuple[float, float]]]:
        """Return a bin for each place that has a finite value, and the holes.

        A hole is the first and the last x of consecutive values that are NaN or infinite; each
        place has one at most.
        """
        xs, values = self._in_order(by_step=by_step)
        found = []
        holes: list[tuple[float, float]] = []
        after_hole = -1  # the index of the point after the last hole
        starts = [bisect_left(xs, edge) for edge in places.edges]
        ends = [*starts[1:], len(xs)] if starts else []
        for x, start, end in zip(places.xs, starts, ends, strict=True):
            part = values[start:end]
            if not part:
                continue
            total = sum(part)
            if math.isfinite(total):  # the usual case
                mean = total / len(part)
                found.append(Bin(x=x, low=min(part), mean=mean, high=max(part)))
                continue
            bad = [i for i in range(start, end) if not math.isfinite(values[i])]
            if bad:
                first_x = holes.pop()[0] if bad[0] == after_hole else xs[bad[0]]
                holes.append((first_x, xs[bad[-1]]))
                after_hole = bad[-1] + 1
            finite = [value for value in part if math.isfinite(value)]
            if finite:
                low, high = min(finite), max(finite)
                found.append(Bin(x=x, low=low, mean=mean_of(finite), high=high))
        return found, holes

    def _in_order(self, *, by_step: bool) -> tuple[list[float], list[float]]:
        """Return all x that are numbers, in order, and their values. A step may arrive late."""
        # Lists: their parts are read faster than those of arrays.
        xs = self.xs(by_step=by_step).tolist()
        values = self._table[3 : _COLUMNS * self._size : _COLUMNS].tolist()
        if math.isfinite(sum(xs)) and sorted(xs) == xs:
            return xs, values
        pairs = [
            pair for pair in zip(xs, values, strict=True) if math.isfinite(pair[0])
        ]
        pairs.sort(key=itemgetter(0))
        return [x for x, _ in pairs], [value for _, value in pairs]

    def _point(self, index: int) -> Point:
        start = _COLUMNS * index
        at_s, step, _, value = self._table[start : start + _COLUMNS]
        return Point(at_s=at_s, step=None if math.isnan(step) else step, value=value)

    def __iter__(self) -> Iterator[Point]:
        return map(self._point, range(self._size))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Series):
            return False
        # By their texts, because NaN is not equal to itself.
        return [repr(point) for point in self] == [repr(point) for point in other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        last = f", the last {self[-1]}" if self._size else ""
        return f"<Series of {plural(self._size, 'point')}{last}>"


def _thinned(table: array[float]) -> array[float]:
    """Return about half of the points: the first, the last, and the notable ones of each small
    group.
    """
    size = len(table) // _COLUMNS
    values = table[3::_COLUMNS]
    kept = []
    for start in range(0, size, _THINNED):
        part = values[start : start + _THINNED]
        kept += [start + index for index in _telling(part)]
    thin = array("d")
    for index in dict.fromkeys([0, *kept, size - 1]):
        thin.extend(table[_COLUMNS * index : _COLUMNS * (index + 1)])
    return thin


def _telling(part: array[float]) -> list[int]:
    """Return the indices of the min, the max, the first NaN and the first infinite value, in
    order.
    """
    # The usual case: this takes a quarter of the time of the code below.
    if math.isfinite(sum(part)):
        return sorted({part.index(min(part)), part.index(max(part))})
    places = set()
    for is_bad in (math.isnan, math.isinf):
        bad = list(map(is_bad, part))
        if any(bad):
            places.add(bad.index(True))
    finite = list(filter(math.isfinite, part))
    if finite:
        places |= {part.index(min(finite)), part.index(max(finite))}
    return sorted(places)


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of finite numbers, also where their sum is larger than any float."""
    mean = sum(value / len(values) for value in values)
    return min(max(mean, min(values)), max(values))
