"""Points of a metric: appending makes a new value and leaves the old one as it is."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.state.series import Places, Point, Series, places


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
    assert (len(found), found[-1], found[0].value) == (
        3,
        Point(at_s=5.0, step=None, value=3.0),
        1.0,
    )
    assert (
        repr(found)
        == "<Series of 3 points, the last Point(at_s=5.0, step=None, value=3.0)>"
    )
    assert not Series()
    assert repr(Series()) == "<Series of 0 points>"
    for index in (3, -4):
        with pytest.raises(IndexError):
            found[index]


def test_two_successors_of_one_series():
    first = series(1.0, 2.0)
    left, right = (
        first.extended((1.0, 2.0, 3.0), limit=100),
        first.extended((1.0, 2.0, 4.0), limit=100),
    )
    assert [values(s) for s in (first, left, right)] == [
        [1.0, 2.0],
        [1.0, 2.0, 3.0],
        [1.0, 2.0, 4.0],
    ]
    assert left != right
    assert left == series(1.0, 2.0).extended((1.0, 2.0, 3.0), limit=100)


def test_what_is_no_number_stays_one():
    assert math.isnan(series(math.nan)[0].value)
    assert series(math.nan) == series(math.nan)


def test_several_points_at_once_are_as_one_after_the_other():
    both = Series().extended((0.0, 0.0, 1.0, 0.1, 1.0, 2.0), limit=100)
    assert both == series(1.0, 2.0)
    once = Series().extended(
        [number for i in range(30) for number in (i / 10, float(i), i % 7)], limit=10
    )
    # Of each eight the least and the greatest, and the ends.
    assert values(once) == [0, 6, 6, 0, 6, 0, 6, 0, 1]


def test_a_full_series_keeps_what_stands_out():
    seen = [1.0, 1.1] * 500
    seen[333] = 100.0
    seen[444] = -5.0
    seen[555] = math.nan
    seen[666] = math.inf
    kept = values(series(*seen, limit=50))
    assert len(kept) <= 50
    assert (kept[0], kept[-1]) == (1.0, 1.1)
    assert {100.0, -5.0, math.inf} <= set(kept)
    assert any(math.isnan(value) for value in kept)


def binned(seen: Series, limit: int, *, by_step: bool = True):
    return seen.bins(places([seen.xs(by_step=by_step)], limit), by_step=by_step)


NUMBERS = st.one_of(
    st.floats(-1e6, 1e6),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308]),
)


@given(
    st.lists(NUMBERS, min_size=1, max_size=120),
    st.integers(8, 40),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_the_picture_agrees_with_all_that_was_reported(reported, limit, batch, bins):
    """Whatever comes, in whatever batches: nothing that a reader looks for is lost, in the points and in the picture."""
    seen = Series()
    for start in range(0, len(reported), batch):
        numbers: list[float] = []
        for i, value in enumerate(reported[start : start + batch], start):
            numbers += (i / 10, float(i), value)
        before, points = seen, list(seen)
        seen = seen.extended(numbers, limit=limit)
        assert repr(list(before)) == repr(points)

    kept = values(seen)
    finite = [value for value in reported if math.isfinite(value)]
    assert len(kept) <= limit
    assert repr((kept[0], kept[-1])) == repr((reported[0], reported[-1]))
    assert [point.at_s for point in seen] == sorted(point.at_s for point in seen)
    assert any(map(math.isnan, kept)) == any(map(math.isnan, reported))
    assert any(map(math.isinf, kept)) == any(map(math.isinf, reported))
    kept_finite = [value for value in kept if math.isfinite(value)]
    assert (min(kept_finite, default=None), max(kept_finite, default=None)) == (
        min(finite, default=None), max(finite, default=None),
    )  # fmt: skip

    found, holes = binned(seen, bins)
    assert len(found) <= bins
    assert bool(holes) == (len(finite) < len(reported))
    assert bool(found) == bool(finite)
    if found:
        assert min(one.low for one in found) == min(finite)
        assert max(one.high for one in found) == max(finite)
        assert all(one.low <= one.high for one in found)
        assert 0 <= found[0].x <= found[-1].x <= len(reported) - 1


def test_steps_of_each_epoch_go_on_where_the_last_one_ended():
    numbers: list[float] = []
    for epoch in range(3):
        for step in range(1, 41):
            numbers += (float(epoch * 40 + step), float(step), 1.0)
    seen = Series().extended(numbers, limit=2000)
    assert [point.step for point in seen] == [*range(1, 41)] * 3
    found, _ = binned(seen, 200)
    assert [one.x for one in found] == list(range(1, 121))


def test_a_step_that_comes_late_is_no_epoch():
    seen = Series().extended(
        (0.0, 100.0, 1.0, 1.0, 98.0, 2.0, 2.0, 101.0, 3.0), limit=100
    )
    assert [one.x for one in binned(seen, 10)[0]] == [98.0, 100.0, 101.0]


def test_a_bin_holds_its_neighbours():
    found, holes = binned(series(1.0, 3.0, math.nan, math.inf, 8.0), 2)
    assert [(one.low, one.mean, one.high) for one in found] == [
        (1.0, 2.0, 3.0),
        (8.0, 8.0, 8.0),
    ]
    assert [one.x for one in found] == [0.0, 4.0]  # the first and the last point
    assert holes == [(2.0, 3.0)]
    by_time, _ = binned(series(1.0, 3.0), 2, by_step=False)
    assert [one.x for one in by_time] == [0.0, 0.1]


def test_places_are_those_of_all_lines():
    """A line that has come further than another shares its places, and one that began later."""
    few = places([array("d", (1.0, 2.0)), array("d", (2.0, 4.0, math.nan))], 3)
    assert few == Places([1.0, 2.0, 4.0], [1.0, 2.0, 4.0])
    many = places([array("d", range(10)), array("d", range(5, 101))], 4)
    assert many == Places([0.0, 25.0, 50.0, 75.0], [0.0, 37.5, 62.5, 100.0])
    assert places([array("d")], 4) == Places([], [])


@pytest.mark.parametrize("step", [math.inf, -math.inf, math.nan])
def test_steps_that_are_no_places_have_no_bins(step):
    seen = Series().extended((1.0, step, 7.0), limit=20)
    assert seen.bins(places([seen.xs(by_step=True)], 20), by_step=True) == ([], [])
