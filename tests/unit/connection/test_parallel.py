"""The same act on many hosts: all at the same time, in their order, and the errors of all."""

from __future__ import annotations

import threading

import pytest

from distmagic.connection import parallel
from distmagic.connection.parallel import in_parallel, threads_for
from tests.lab.waiting import HANG_S, wait_until


def test_no_act_waits_for_another():
    barrier = threading.Barrier(100)

    def act(number: int, factor: int) -> int:
        barrier.wait(HANG_S)
        return number * factor

    assert in_parallel(act, range(100), [2] * 100) == [
        2 * number for number in range(100)
    ]
    assert in_parallel(act, []) == []


def test_of_very_many_acts_some_wait(monkeypatch):
    monkeypatch.setattr(parallel, "MOST_AT_ONCE", 5)
    running: list[int] = []
    may_end = threading.Event()

    def act(number: int) -> bool:
        running.append(number)
        return may_end.wait(HANG_S)

    pool = threads_for(8, "test")
    acts = [pool.submit(act, number) for number in range(8)]
    try:
        wait_until(lambda: len(running) == 5, "five acts")
        assert [one.running() for one in acts] == [True] * 5 + [False] * 3
    finally:
        may_end.set()
        pool.shutdown()
    assert all(one.result() for one in acts)


def test_an_act_that_fails_is_told_when_the_others_are_through():
    others = threading.Barrier(2)

    def act(number: int) -> None:
        if number == 1:
            raise ValueError("no")
        others.wait(HANG_S)

    with pytest.raises(ValueError, match="no"):
        in_parallel(act, range(3))
    assert not others.broken
