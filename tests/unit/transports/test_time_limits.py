"""What happens when a time is up: in time, unless it is called off, and whatever other acts do."""

from __future__ import annotations

import threading
import time

import pytest

from distmagic.transports.time_limits import TimeLimit
from tests.builders.since import Since
from tests.lab.waiting import HANG_S, wait_until

LONG_S = 3600.0


@pytest.mark.parametrize("others", ["one that is due later", "one that hangs"])
def test_an_act_happens_when_its_time_is_up_and_not_before(others):
    let_go, happened = threading.Event(), threading.Event()
    seconds = LONG_S if others == "one that is due later" else 0.0
    other = TimeLimit(seconds, lambda: let_go.wait(HANG_S))
    began_s = time.monotonic()
    TimeLimit(0.05, happened.set)
    assert happened.wait(HANG_S)
    assert time.monotonic() - began_s >= 0.05
    other.call_off()
    let_go.set()


def test_what_is_called_off_does_not_happen_and_leaves_no_thread():
    since, wrong = Since(), threading.Event()
    limits = [TimeLimit(5.0, wrong.set) for _ in range(3)]
    for limit in limits:
        limit.call_off()
    wait_until(lambda: not since.threads("distmagic-limit"), "the end of the threads")
    assert not wrong.is_set()


def test_it_may_be_called_off_when_it_has_happened():
    happened = threading.Event()
    limit = TimeLimit(0.0, happened.set)
    assert happened.wait(HANG_S)
    limit.call_off()
    limit.call_off()
