"""The points of a run that a tracker has not got yet."""

from distmagic.comparison.metrics import metrics_of
from distmagic.remote.wire import protocol as p
from distmagic.state.fold import fold
from distmagic.tracking.points import Unsent
from tests.builders.events import begun, progress, worker
from tests.builders.tracking import reported


def steps(points):
    return [(one.rank, one.step) for one in points]


def test_each_point_comes_once_with_its_rank_step_and_time():
    unsent = Unsent()
    state = begun(reported(0, 10, 20), reported(3, 10))
    assert steps(unsent.take(state)) == [(0, 10), (0, 20), (3, 10)]
    assert unsent.take(state) == []
    state = fold(state, [reported(3, 20)])
    (point,) = unsent.take(state)
    assert (point.name, point.value, point.step) == ("loss", 3.0, 20)
    assert point.unix_s == state.began_unix_s + 1.0


def test_points_without_a_step_are_counted():
    unsent = Unsent()
    state = begun(reported(0, None, None))
    assert steps(unsent.take(state)) == [(0, 0), (0, 1)]
    assert steps(unsent.take(fold(state, [reported(0, None)]))) == [(0, 2)]


def test_steps_that_begin_anew_with_each_epoch_go_on():
    state = begun(reported(0, 1, 2, 3), reported(0, 1, 2, at_s=9.0))
    assert steps(Unsent().take(state)) == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]


def test_of_a_series_that_is_thinned_out_no_point_comes_twice():
    unsent = Unsent()
    state = begun()
    seen = []
    for turn in range(100):
        first = turn * 100
        new = reported(0, *range(first, first + 100), at_s=float(first))
        state = fold(state, [new])
        seen += steps(unsent.take(state))
    assert len(state.series[0]["loss"]) < 10_000  # it was thinned out
    assert len(set(seen)) == len(seen) > 5_000
    assert seen == sorted(seen)


def test_the_points_of_a_rank_that_was_restarted_come_too():
    unsent = Unsent()
    state = begun(reported(0, 1, 2, at_s=50.0), restarts=1)
    unsent.take(state)
    state = fold(state, [worker(0, 0, restart=1), reported(0, 3, at_s=0.5, restart=1)])
    assert steps(unsent.take(state)) == [(0, 3)]


def test_a_rank_that_resumes_before_half_of_its_steps_begins_no_epoch():
    again = worker(0, 0, restart=1)
    resumed = reported(0, 30, 40, at_s=0.5, restart=1)
    state = begun(reported(0, 50, 100), again, resumed, restarts=1)
    assert steps(Unsent().take(state)) == [(0, 50), (0, 100), (0, 30), (0, 40)]
    epochs = reported(0, 1, at_s=9.0, restart=1)
    assert steps(Unsent().take(fold(state, [epochs])))[-1] == (0, 41)


def test_points_without_a_step_are_spread_where_a_series_was_thinned_out():
    state = begun()
    for turn in range(50):
        new = reported(0, *[None] * 100, at_s=float(100 * turn))
        state = fold(state, [new])
    numbers = [step for _, step in steps(Unsent().take(state))]
    assert len(numbers) < 5000
    assert (numbers[0], numbers == sorted(set(numbers))) == (0, True)
    assert 4990 < numbers[-1] < 5000


def test_what_was_reported_together_is_one_row_after_a_restart_too():
    def together(at_s: float, **metrics: float) -> p.MetricRow:
        return p.MetricRow(at_s=at_s, step=at_s, metrics=metrics)

    before = p.points_of([together(s, loss=s) for s in (1.0, 2.0, 3.0)])
    before |= p.points_of([together(2.0, val=0.2)])
    after = p.points_of([together(2.5, loss=9.0, val=0.5, new=1.0)])
    state = begun(
        progress(0, node=0, points=before),
        worker(0, 0, restart=1),
        progress(0, node=0, points=after, restart=1),
        restarts=1,
    )
    *_, last = rows = metrics_of(state)
    assert last == {"rank": 0, "at_s": 2.5, "step": 2.5, "loss": 9.0, "val": 0.5, "new": 1.0}  # fmt: skip
    assert len(rows) == 4
