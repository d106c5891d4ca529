"""How long ranks that stay have been without a cell, and when they end."""

from __future__ import annotations

import math

import pytest

from distmagic.remote.wire import protocol as p
from distmagic.state.fold import fold
from distmagic.staying.idle import IdleTime
from distmagic.staying.starting import SessionScreen
from tests.builders.events import at, begun, progress


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_time_counts_between_cells_alone_and_is_up_once():
    clock = Clock()
    idle = IdleTime(30.0, clock)
    clock.now_s += 1000  # the ranks are being started
    assert (idle.left_s, idle.runs_out()) == (math.inf, False)
    assert idle.begin_cell()
    clock.now_s += 1000
    assert (idle.left_s, idle.runs_out()) == (math.inf, False)
    idle.end_cell()
    clock.now_s += 29
    assert (idle.left_s, idle.runs_out()) == (1.0, False)
    assert idle.begin_cell()
    idle.end_cell()
    clock.now_s += 30
    assert [idle.runs_out(), idle.runs_out()] == [True, False]
    assert not idle.begin_cell()


def test_without_a_limit_it_is_never_up():
    clock = Clock()
    idle = IdleTime(math.inf, clock)
    assert idle.begin_cell()
    idle.end_cell()
    clock.now_s += 1e9
    assert (idle.left_s, idle.runs_out()) == (math.inf, False)
    idle.limit_s = 60.0  # a later cell has named one
    assert idle.runs_out()


@pytest.mark.parametrize(("limit_s", "notice_s"), [(3600.0, 300.0), (60.0, 30.0)])
def test_a_notice_is_due_once_in_each_idle_time(limit_s, notice_s):
    clock = Clock()
    idle = IdleTime(limit_s, clock)
    assert not idle.notice_is_due()  # the ranks are being started
    for _ in range(2):
        assert idle.begin_cell()
        clock.now_s += limit_s
        assert not idle.notice_is_due()
        idle.end_cell()
        clock.now_s += limit_s - notice_s - 1
        assert not idle.notice_is_due()
        clock.now_s += 1
        assert [idle.notice_is_due(), idle.notice_is_due()] == [True, False]
        assert idle.left_s == notice_s
    idle.limit_s *= 2  # by a later cell
    assert not idle.notice_is_due()


def test_a_notice_comes_too_late_after_the_end_and_never_without_a_limit():
    clock = Clock()
    idle = IdleTime(60.0, clock)
    idle.end_cell()
    clock.now_s += 60
    assert not idle.notice_is_due()
    idle = IdleTime(math.inf, clock)
    idle.end_cell()
    clock.now_s += 1e9
    assert not idle.notice_is_due()


def test_gpus_that_work_are_no_idle_time_and_end_no_cell():
    clock = Clock()
    idle = IdleTime(30.0, clock)
    idle.note_gpu_use()
    assert idle.left_s == math.inf, "before the first cell"
    assert idle.begin_cell()
    idle.note_gpu_use()
    assert idle.left_s == math.inf, "during a cell"
    idle.end_cell()
    clock.now_s += 20
    assert idle.notice_is_due()
    idle.note_gpu_use()
    clock.now_s += 20
    assert idle.notice_is_due(), "the time has begun anew"
    assert (idle.left_s, idle.runs_out()) == (10.0, False)
    clock.now_s += 10
    assert idle.runs_out()


def test_a_session_ends_when_no_new_measurement_shows_work():
    clock = Clock()
    idle = IdleTime(30.0, clock)
    screen = SessionScreen(idle, can_type=False, is_kept=False)
    kept = IdleTime(30.0, clock)  # of ranks whose hosts count their cells alone
    kept_screen = SessionScreen(kept, can_type=False, is_kept=True)
    state = begun(progress(0, device="cuda:0", step=1.0))
    idle.end_cell()
    kept.end_cell()
    asked = []
    # A thread that a cell has left works for a minute.
    for share, at_s in (
        (0.9, 10.0),
        (0.9, 30.0),
        (0.9, 60.0),
        (0.04, 80.0),
        (0.0, 89.0),
        (None, 90.0),
    ):
        clock.now_s = 100.0 + at_s
        gpus = (p.Gpu(utilization=share),)
        state = fold(state, [at(p.Hardware(gpus=gpus), 0, at_s)])
        screen.show(state)
        screen.show(state)  # the same measurement again
        kept_screen.show(state)
        asked.append(screen.requests())
    assert asked == [(), (), (), (), (), ("stop",)]
    assert kept.left_s == 0.0
