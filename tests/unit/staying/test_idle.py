"""How long ranks that stay have been without a cell, and when they end."""

from __future__ import annotations

import math

import pytest

from distmagic.staying.idle import IdleTime


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
