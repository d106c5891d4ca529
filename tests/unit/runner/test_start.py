"""A start that came about on some hosts only: what is stopped, and what is said of hosts that may still run something."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from distmagic.connection.link import Link
from distmagic.errors import ConnectionLost, PreflightError, Unreachable
from distmagic.remote.wire import protocol as p
from distmagic.runner import start
from distmagic.runner.start import cancelled, roll_back
from tests.builders.hosts import HANG_UP, FakeHost, reach, runs_on
from tests.builders.messages import START
from tests.lab.waiting import HANG_S

STOPPED = p.StopNode(grace_s=0.0, reason="another host could not start")


class Stage:
    """Two hosts to which links are open, and the futures of their starts."""

    def __init__(self) -> None:
        self.a, self.b = FakeHost("gpu-a", runs_on), FakeHost("gpu-b", runs_on)
        self.links = tuple(reach(self.a, self.b).wait().values())
        self.pool = ThreadPoolExecutor(4)

    def start(self, link: Link) -> Future[None]:
        """Start a node and wait for it."""
        future = self.pool.submit(link.start, START)
        future.exception(30)
        return future

    def roll_back(self, *started: Future[None]) -> list[str]:
        return roll_back(self.links, started)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    for link in stage.links:
        link.close()
    stage.pool.shutdown()


def failed(error: Exception) -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(error)
    return future


def test_what_had_started_is_stopped_at_once(stage):
    unsure = stage.roll_back(
        stage.start(stage.links[0]), failed(PreflightError("gpu-b", "has no room."))
    )
    assert unsure == []
    assert stage.a.requests_of(p.StopNode) == [STOPPED]
    assert stage.b.requests == []


@pytest.mark.parametrize(
    "error",
    [
        ConnectionLost("gpu-b: the connection ended."),
        Unreachable("gpu-b", "no answer."),
    ],
)
def test_a_host_whose_start_got_no_answer_may_run_all_the_same(stage, error):
    assert stage.roll_back(stage.start(stage.links[0]), failed(error)) == ["gpu-b"]
    assert stage.a.requests_of(p.StopNode) == [STOPPED]


def test_nothing_is_stopped_where_nothing_was_started(stage):
    assert stage.roll_back() == []
    assert stage.a.requests == stage.b.requests == []


def test_a_start_that_had_not_begun_is_taken_back(stage):
    waiting: Future[None] = Future()
    assert stage.roll_back(stage.start(stage.links[0]), waiting) == []
    assert waiting.cancelled()
    assert stage.b.requests == []


def test_a_start_under_way_is_waited_for_and_stopped(stage):
    is_asked, may_answer = threading.Event(), threading.Event()

    def answer_late(_: p.Message) -> list[p.Message | bytes]:
        is_asked.set()
        assert may_answer.wait(HANG_S)
        return [
            p.encode(
                p.Hello(
                    protocol=p.PROTOCOL, job="j-1", node_rank=1, hostname="b", pid=9
                ),
                1,
            )
        ]

    stage.b.answers[p.StartNode] = answer_late
    stage.b.answers[p.StopNode] = lambda _: [p.encode(p.Final(reason="stopped"), 2)]
    late = stage.pool.submit(stage.links[1].start, START)
    assert is_asked.wait(HANG_S)
    rolled = stage.pool.submit(
        stage.roll_back, failed(PreflightError("gpu-a", "has no room.")), late
    )
    may_answer.set()
    assert rolled.result(HANG_S) == []
    assert stage.b.requests_of(p.StopNode) == [STOPPED]


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: HANG_UP,
        lambda _: [
            p.encode(p.Final(reason="stopped", survivors=("python (pid 7, D)",)), 3)
        ],
        lambda _: [],
    ],
    ids=["hangs up", "has survivors", "is silent"],
)
def test_a_host_that_does_not_confirm_its_end_is_named(stage, monkeypatch, answer):
    monkeypatch.setattr(start, "_PATIENCE_S", 1.0)
    stage.a.answers[p.StopNode] = answer
    unsure = stage.roll_back(stage.start(stage.links[0]), stage.start(stage.links[1]))
    assert unsure == ["gpu-a"]
    assert stage.b.requests_of(p.StopNode) == [STOPPED]


def test_a_host_that_never_answers_its_start_is_named(stage, monkeypatch):
    monkeypatch.setattr(start, "_PATIENCE_S", 1.0)
    is_asked = threading.Event()

    def keep_silent(_: p.Message) -> list[p.Message | bytes]:
        is_asked.set()
        return []

    stage.b.answers[p.StartNode] = keep_silent
    silent = stage.pool.submit(stage.links[1].start, START)
    assert is_asked.wait(HANG_S)
    assert stage.roll_back(stage.start(stage.links[0]), silent) == ["gpu-b"]


def test_no_interrupt_ends_a_rollback(stage):
    def stop_in_spite_of_it(request: p.Message) -> list[p.Message | bytes]:
        os.kill(os.getpid(), signal.SIGINT)
        return [p.encode(p.Final(reason="stopped"), 3)]

    stage.a.answers[p.StopNode] = stop_in_spite_of_it
    assert stage.roll_back(stage.start(stage.links[0])) == []


# ---- in words


@pytest.mark.parametrize(
    ("began", "unsure"),
    [
        (False, []),
        (True, []),
        (True, ["gpu-a", "gpu-b"]),
    ],
)  # fmt: skip
def test_what_an_interrupt_of_a_start_has_left(began, unsure, golden):
    error = cancelled(began=began, unsure=unsure)
    golden(error)
