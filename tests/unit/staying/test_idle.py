"""How long ranks that stay have been without a cell, and when they end."""

from __future__ import annotations

import math

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
