"""The points of one metric of one rank: a value that grows in constant time and stays small. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of a metric: seconds since the rank started, the step if the rank gave one, the value."""

    at_s: float
    step: float | None
    value: float


class Series(Sequence[Point]):
    """Points in order of arrival. `extended` returns a longer one and leaves this one as it is.

    The numbers lie in one table that a series and its longer successors share: each sees only its own length of it,
    so that appending copies nothing, and a state that somebody holds on to never changes.
    """

    __slots__ = ("_size", "_table")

    def __init__(self, table: array[float] | None = None) -> None:
        self._table = array("d") if table is None else table  # at_s, step, value; at_s, step, value; ...
        self._size = len(self._table) // 3

    def extended(self, numbers: Sequence[float], *, limit: int) -> Series:
        """Return this series and more points; of more than `limit`, every second one is left out.

        `numbers` are at_s, step (NaN where the rank gave none) and value of the first point, of the second, and so on.
        """
        end = 3 * self._size
        table = self._table
        if len(table) != end:  # another successor has grown it already
            table = table[:end]
        table.extend(numbers)
        while len(table) > 3 * limit:
            table = _thinned(table)
        return Series(table)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Point, ...]: ...
    def __getitem__(self, index: int | slice) -> Point | tuple[Point, ...]:
        if isinstance(index, slice):
            return tuple(self._point(i) for i in range(*index.indices(self._size)))
        if not -self._size <= index < self._size:
            raise IndexError(index)
        return self._point(index % self._size)

    def every(self, stride: int) -> tuple[array[float], array[float], array[float]]:
        """Return at_s, step (NaN where the rank gave none) and value of every `stride`-th point, the last one among them."""
        start = 3 * ((self._size - 1) % stride)
        end = 3 * self._size
        at_s = self._table[start : end : 3 * stride]
        step = self._table[start + 1 : end : 3 * stride]
        value = self._table[start + 2 : end : 3 * stride]
        return at_s, step, value

    def _point(self, index: int) -> Point:
        start = 3 * index
        at_s, step, value = self._table[start : start + 3]
        return Point(at_s=at_s, step=None if math.isnan(step) else step, value=value)

    def __iter__(self) -> Iterator[Point]:
        return (self._point(index) for index in range(self._size))

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
    """Return every second point, counted from the end: the last one always stays."""
    size = len(table) // 3
    first, kept = (size - 1) % 2, (size + 1) // 2
    thin = array("d", bytes(table.itemsize * 3 * kept))
    for column in range(3):
        thin[column::3] = table[3 * first + column :: 6]
    return thin
