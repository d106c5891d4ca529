"""What happens when a time is up: in time, unless it is called off, and whatever other acts do."""

from __future__ import annotations

import sys
import threading
import time
import weakref

import pytest

from distmagic.transports import time_limits
from distmagic.transports.time_limits import TimeLimit
from tests.builders.shell import completed
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


def test_a_limit_holds_where_no_thread_can_be_had_for_it(monkeypatch):
    happened = threading.Event()
    watcher = time_limits._Watcher()
    monkeypatch.setattr(time_limits, "_watcher", watcher)

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(time_limits.threads, "begin", refuse)
    with pytest.raises(RuntimeError):
        TimeLimit(LONG_S, happened.set)
    monkeypatch.undo()
    monkeypatch.setattr(time_limits, "_watcher", watcher)
    watched = TimeLimit(LONG_S, happened.set)
    assert watcher._has_begun
    watched.call_off()
    monkeypatch.setattr(time_limits.threads, "begin", refuse)
    TimeLimit(0.0, happened.set)
    assert happened.wait(HANG_S)


def test_a_limit_that_was_called_off_keeps_nothing_alive():
    class Connection:
        def close(self) -> None:
            """Do nothing."""

    connection, looked = Connection(), threading.Event()
    TimeLimit(0.0, looked.set)
    limit = TimeLimit(LONG_S, connection.close)
    assert looked.wait(HANG_S)
    limit.call_off()
    gone = weakref.ref(connection)
    del connection, limit
    wait_until(lambda: gone() is None, "the connection to be gone")


def test_what_is_called_off_does_not_happen_and_one_thread_watches_all():
    since, wrong, last = Since(), threading.Event(), threading.Event()
    limits = [TimeLimit(0.2, wrong.set) for _ in range(100)]
    assert len(since.threads("distmagic-limit")) <= 1
    for limit in limits:
        limit.call_off()
    TimeLimit(0.3, last.set)
    assert last.wait(HANG_S)
    assert not wrong.is_set()


FORKED = """
import os, threading
from distmagic.transports.time_limits import TimeLimit
limit = TimeLimit(3600, list)
if not os.fork():
    happened = threading.Event()
    limit.call_off()
    TimeLimit(0.0, happened.set)
    if happened.wait(60):
        os.write(1, b"happened in the child\\n")
    os._exit(0)
os.wait()
"""


def test_a_forked_child_has_limits_of_its_own():
    done = completed([sys.executable, "-W", "ignore", "-c", FORKED], check=False)
    assert (done.returncode, done.stdout) == (0, "happened in the child\n"), done.stderr


def test_it_may_be_called_off_when_it_has_happened():
    happened = threading.Event()
    limit = TimeLimit(0.0, happened.set)
    assert happened.wait(HANG_S)
    limit.call_off()
    limit.call_off()
