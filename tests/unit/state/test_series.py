"""Points of a metric: appending makes a new value and leaves the old one as it is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.state.series import Point, Series


def series(*values: float, limit: int = 100) -> Series:
    found = Series()
    for i, value in enumerate(values):
        found = found.extended((i / 10, float(i), value), limit=limit)
    return found


def values(one: Series) -> list[float]:
    return [point.value for point in one]


def test_a_series_is_a_sequence_of_points():
    found = series(1.0, 2.0).extended((5.0, math.nan, 3.0), limit=100)
    assert list(found) == [
        Point(at_s=0.0, step=0.0, value=1.0),
        Point(at_s=0.1, step=1.0, value=2.0),
        Point(at_s=5.0, step=None, value=3.0),
    ]
    assert (len(found), found[-1], found[0].value) == (3, Point(at_s=5.0, step=None, value=3.0), 1.0)
    assert found[::2] == (found[0], found[2])
    assert found[5:] == ()
    assert repr(found) == "<Series of 3 points, the last Point(at_s=5.0, step=None, value=3.0)>"
    assert not Series()
    assert repr(Series()) == "<Series of 0 points>"
    for index in (3, -4):
        with pytest.raises(IndexError):
            found[index]


def test_two_successors_of_one_series():
    first = series(1.0, 2.0)
    left, right = first.extended((1.0, 2.0, 3.0), limit=100), first.extended((1.0, 2.0, 4.0), limit=100)
    assert [values(s) for s in (first, left, right)] == [[1.0, 2.0], [1.0, 2.0, 3.0], [1.0, 2.0, 4.0]]
    assert left != right
    assert left == series(1.0, 2.0).extended((1.0, 2.0, 3.0), limit=100)


def test_what_is_no_number_stays_one():
    assert math.isnan(series(math.nan)[0].value)
    assert series(math.nan) == series(math.nan)


def test_several_points_at_once_are_as_one_after_the_other():
    both = Series().extended((0.0, 0.0, 1.0, 0.1, 1.0, 2.0), limit=100)
    assert both == series(1.0, 2.0)
    assert values(series(*map(float, range(4)), limit=4).extended((9.0, 9.0, 9.0) * 5, limit=4)) == [0.0, 9.0, 9.0]


@pytest.mark.parametrize(("count", "kept"), [(4, [0, 1, 2, 3]), (5, [0, 2, 4]), (6, [0, 2, 4, 5]), (7, [0, 4, 6])])
def test_a_full_series_keeps_every_second_point_and_the_last(count, kept):
    assert values(series(*map(float, range(count)), limit=4)) == kept


@given(st.integers(2, 20), st.integers(1, 200))
def test_bounds_and_order(limit, count):
    seen = Series()
    for i in range(count):
        before, points = seen, list(seen)
        seen = seen.extended((float(i), math.nan, float(i)), limit=limit)
        assert list(before) == points
        assert len(seen) <= limit
        assert seen[-1].value == i
        assert values(seen) == sorted(set(values(seen)))
