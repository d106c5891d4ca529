"""What happens when a time is up: once, in time, whatever else hangs; and from one thread for all."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import pytest

from distmagic.remote.system import threads
from distmagic.transports import time_limits as time_limits_module
from distmagic.transports.time_limits import TimeLimits, time_limits
from tests.builders.shell import completed
from tests.builders.since import Since
from tests.lab.waiting import HANG_S, wait_until

LONG_S = 3600.0


@pytest.fixture
def begun_here():
    """Return what lists the threads that were begun since, and run yet."""
    since = Since()
    return lambda: since.threads("distmagic-limits")


def test_an_act_happens_when_its_time_is_up_and_not_before():
    happened = threading.Event()
    began_s = time.monotonic()
    TimeLimits().after(0.05, happened.set)
    assert happened.wait(HANG_S)
    assert time.monotonic() - began_s >= 0.05


def test_an_act_that_is_due_earlier_does_not_wait_for_one_that_is_due_later():
    limits, wrong, happened = TimeLimits(), threading.Event(), threading.Event()
    limits.after(LONG_S, wrong.set)
    limits.after(0.05, happened.set)
    assert happened.wait(HANG_S)
    assert not wrong.is_set()


def test_what_is_called_off_does_not_happen():
    limits, wrong, last = TimeLimits(), threading.Event(), threading.Event()
    numbers = [limits.after(5.0, wrong.set) for _ in range(3)]
    for number in numbers:
        limits.call_off(number)
    assert not limits._acts
    limits.after(0.02, last.set)
    assert last.wait(HANG_S)
    assert not wrong.is_set()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_where_no_thread_can_be_started_acts_happen_all_the_same(
    monkeypatch, begun_here, error
):
    limits, happened = TimeLimits(), threading.Event()
    begin = threads.begin

    def refuse(name: str, act: Callable[[], object]) -> None:
        if act != limits._watch:
            raise error("can't start new thread")
        begin(name, act)

    monkeypatch.setattr(threads, "begin", refuse)
    limits.after(0.0, lambda: 1 / 0)  # it takes none of the others along
    limits.after(0.05, happened.set)
    assert happened.wait(HANG_S)
    wait_until(lambda: not begun_here(), "the end of its thread")
    happened.clear()
    limits.after(0.0, happened.set)
    assert happened.wait(HANG_S)


def test_where_not_even_its_own_thread_can_be_started_the_next_one_is_tried_anew(
    monkeypatch,
):
    def refuse(name: str, act: Callable[[], object]) -> None:
        raise RuntimeError("can't start new thread")

    limits, wrong, happened = TimeLimits(), threading.Event(), threading.Event()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(threads, "begin", refuse)
        with pytest.raises(RuntimeError):
            limits.after(0.0, wrong.set)
    limits.after(0.0, happened.set)
    assert happened.wait(HANG_S)
    assert not wrong.is_set()


def test_a_look_that_fails_ends_no_limit(monkeypatch):
    limits, happened, failures = TimeLimits(), threading.Event(), []
    look = limits._look

    def fail_once() -> None:
        if not failures:
            failures.append("no memory")
            raise MemoryError
        look()

    monkeypatch.setattr(limits, "_look", fail_once)
    limits.after(0.0, happened.set)
    assert happened.wait(HANG_S)
    assert failures


def test_it_may_be_called_off_when_it_has_happened():
    limits, happened = TimeLimits(), threading.Event()
    number = limits.after(0.0, happened.set)
    assert happened.wait(HANG_S)
    limits.call_off(number)
    limits.call_off(number)
    again = threading.Event()
    limits.after(0.0, again.set)
    assert again.wait(HANG_S)


def test_one_thread_is_enough_for_all_limits_and_ends_with_the_last(begun_here):
    limits = TimeLimits()
    numbers = [limits.after(LONG_S, list) for _ in range(1000)]
    assert len(begun_here()) == 1
    for number in numbers:
        limits.call_off(number)
    wait_until(lambda: not begun_here(), "the end of its thread")
    happened = threading.Event()
    limits.after(0.0, happened.set)  # it begins anew
    assert happened.wait(HANG_S)
    wait_until(lambda: not begun_here(), "the end of its thread")


def test_an_act_that_hangs_holds_up_no_other():
    limits, let_go, happened = TimeLimits(), threading.Event(), threading.Event()
    limits.after(0.0, lambda: let_go.wait(60))
    limits.after(0.05, happened.set)
    try:
        assert happened.wait(HANG_S)
    finally:
        let_go.set()


def test_an_act_that_fails_takes_no_other_along(monkeypatch):
    failures = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    limits, happened = TimeLimits(), threading.Event()
    limits.after(0.0, lambda: 1 / 0)
    limits.after(0.05, happened.set)
    assert happened.wait(HANG_S)
    wait_until(lambda: failures, "what is said of the act that failed")
    assert [failure.exc_type for failure in failures] == [ZeroDivisionError]


def test_limits_of_many_threads_at_once(begun_here):
    limits, happened = TimeLimits(), threading.Semaphore(0)

    def several():
        for _ in range(50):
            limits.call_off(limits.after(LONG_S, list))
            limits.after(0.0, happened.release)

    for thread in [threading.Thread(target=several) for _ in range(20)]:
        thread.start()
    for _ in range(20 * 50):
        assert happened.acquire(timeout=HANG_S)
    wait_until(lambda: not begun_here(), "the end of all threads")


def test_a_process_has_its_own():
    assert time_limits() is time_limits()
    done = completed([sys.executable, "-W", "ignore", "-c", FORKED], check=False)
    assert (done.returncode, done.stdout) == (0, "happened in the child\n"), done.stderr


# The parent has a limit, and another thread of it holds their lock while the process is forked. The child calls the
# parent's limit off, too.
FORKED = """
import os, threading
from distmagic.transports import time_limits as time_limits_module
from distmagic.transports.time_limits import time_limits
limits = time_limits()
number = limits.after(3600, list)
held, let_go = threading.Event(), threading.Event()
def hold():
    with limits._watching:
        held.set()
        let_go.wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if not child:
    happened = threading.Event()
    limits.call_off(number)
    time_limits().after(0.0, happened.set)
    if happened.wait(60):
        os.write(1, b"happened in the child\\n")
    os._exit(0)
os.waitpid(child, 0)
let_go.set()
"""


def test_a_limit_that_a_finalizer_asks_for_while_one_is_begun_waits_for_nothing(
    monkeypatch, begun_here
):
    """Memory is collected wherever a thread is begun."""
    limits, happened = TimeLimits(), threading.Event()
    begin = threads.begin
    asked = [lambda: limits.after(0.0, happened.set)]

    def collect_and_begin(name: str, act: Callable[[], object]) -> None:
        if asked:
            asked.pop()()
        begin(name, act)

    monkeypatch.setattr(threads, "begin", collect_and_begin)
    asking = threading.Thread(target=limits.after, args=(LONG_S, int), daemon=True)
    asking.start()
    assert happened.wait(HANG_S)
    asking.join(HANG_S)
    assert not asking.is_alive()
    limits._acts.clear()
    wait_until(lambda: not begun_here(), "the end of its threads")


def test_no_error_ends_the_thread_that_looks(monkeypatch):
    limits, happened = TimeLimits(), threading.Event()
    errors = [MemoryError()]
    has_acts = limits._has_acts

    def fail_once() -> bool:
        if errors:
            raise errors.pop()
        return has_acts()

    monkeypatch.setattr(limits, "_has_acts", fail_once)
    limits.after(0.0, lambda: None)
    wait_until(lambda: not errors, "the error")
    limits.after(0.0, happened.set)
    assert happened.wait(HANG_S)


def test_a_child_with_the_pid_of_an_ancestor_has_limits_of_its_own(monkeypatch):
    older = time_limits()
    reading, writing = os.pipe()
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setitem(time_limits_module._of_processes, 7, older)
    if os.fork() == 0:
        os.write(writing, b"own" if time_limits() is not older else b"old")
        os._exit(0)
    os.wait()
    assert os.read(reading, 3) == b"own"
    os.close(reading)
    os.close(writing)
