"""An interrupt in each stage of a launch: what is stopped, and what the user reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distmagic.errors import Cancelled
from distmagic.remote.wire import protocol as p
from distmagic.runner import start
from tests.builders.hosts import FakeHost, reach, runs_on
from tests.builders.jobs import (
    LatePressingScreen,
    PressingScreen,
    assert_left,
    has_ranks,
    killed_agent,
    launched,
    press,
    two,
)
from tests.builders.runs import FakeScreen
from tests.lab.waiting import HANG_S


def pressing(
    *answer: p.Message | bytes,
) -> Callable[[p.Message], tuple[p.Message | bytes, ...]]:
    """Return an answer of a host, before which the user interrupts."""

    def answer_then(_: p.Message) -> tuple[p.Message | bytes, ...]:
        press()
        return answer

    return answer_then


def cancelled(tmp_path: Path, *hosts: FakeHost) -> str:
    """Launch a job that is interrupted before it has begun; return the error's text."""
    screen = FakeScreen()
    with pytest.raises(Cancelled) as caught:
        launched(tmp_path, *hosts, screen=screen)
    assert [(state.phase, state.abandoned) for state in screen.finished] == [
        ("stopped", caught.value.message)
    ]
    assert_left(*hosts)
    return str(caught.value)


def test_an_interrupt_while_hosts_are_reached(tmp_path, monkeypatch, golden):
    a, b = two()
    may_answer = threading.Event()
    connect = b.connect

    def connect_late() -> Any:
        assert may_answer.wait(HANG_S)
        return connect()

    monkeypatch.setattr(b, "connect", connect_late)
    reaching = reach(a, b)
    reaching.futures[0].result(HANG_S)
    try:
        with pytest.raises(Cancelled) as caught:
            launched(
                tmp_path, reaching=reaching, screen=PressingScreen(lambda state: True)
            )
    finally:
        may_answer.set()
    golden(caught.value)
    assert reaching.futures[1].result(HANG_S)
    assert_left(a, b)


def test_an_interrupt_while_hosts_are_planned_for(tmp_path):
    a, b = two()
    b.answers[p.GetRoute] = pressing()
    assert cancelled(tmp_path, a, b) == "Interrupted; nothing was started."


def test_an_interrupt_while_hosts_are_sent_what_they_need(tmp_path, golden):
    a, b = two()
    b.answers[p.OfferBlobs] = pressing()
    text = cancelled(tmp_path, a, b)
    golden(text)
    assert a.requests_of(p.StartNode) == b.requests_of(p.StartNode) == []


def test_an_interrupt_while_hosts_start_stops_those_that_have(tmp_path, golden):
    a, b = two(runs_on)
    hello = p.Hello(protocol=p.PROTOCOL, job="j", node_rank=1, hostname="b", pid=9)
    b.answers[p.StartNode] = pressing(
        p.WorkDirReady(path="/home/me/.distmagic/work/train"), p.encode(hello, 1)
    )
    b.answers[p.StopNode] = lambda _: [p.encode(p.Final(reason="stopped"), 2)]
    text = cancelled(tmp_path, a, b)
    golden(text)
    assert len(a.requests_of(p.StopNode)) == len(b.requests_of(p.StopNode)) == 1


def test_an_interrupt_while_hosts_start_names_those_that_do_not_confirm_their_end(
    tmp_path, monkeypatch, golden
):
    monkeypatch.setattr(start, "_PATIENCE_S", 1.0)
    a, b = two(runs_on)
    b.answers[p.StartNode] = pressing()
    golden(cancelled(tmp_path, a, b))


def test_an_interrupt_of_a_run_stops_every_rank_and_the_run_is_left(tmp_path):
    a, b = two(runs_on)
    followed = launched(tmp_path, a, b, screen=PressingScreen(has_ranks))
    assert (followed.state.phase, followed.state.stopping) == ("stopped", "interrupted")
    for host in (a, b):
        assert host.requests_of(p.StopNode) == [
            p.StopNode(grace_s=followed.state.terms.grace_s, reason="interrupted")
        ]
    assert not followed.was_interrupted, (
        "it was an interrupt of the run, not one behind it"
    )
    assert_left(a, b)


def test_an_interrupt_of_the_sweep_gives_it_up(tmp_path):
    a, b = two(runs_on)
    b.answers[p.SweepJob] = pressing()

    followed = launched(tmp_path, a, b, screen=killed_agent(b))
    assert list(followed.state.lost) == [1]
    b.cut()  # ends the sweep, which nobody waits for any more


def test_an_interrupt_of_a_run_that_is_over_does_not_take_it_away(tmp_path):
    a, b = two()
    followed = launched(tmp_path, a, b, screen=LatePressingScreen())
    assert followed.was_interrupted
    assert followed.state.phase == "done"
    assert len(followed.small_results) == 2
