"""The first part of a run: what is shown while hosts are reached and started, and what an interrupt does to it."""

from __future__ import annotations

import itertools
import os
import signal
from concurrent.futures import Future

import pytest

from distmagic.connection.first_links import FirstLinks
from distmagic.errors import Cancelled, Unreachable
from distmagic.runner import connect, interrupts
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.interrupts import Interrupts
from distmagic.runner.run_loop import BEAT_S, RunLoop
from distmagic.state.events import Abandoned, Planned, Sending, Warned
from distmagic.state.fold import begin
from distmagic.state.model import RunState
from tests.builders.runs import FakeScreen
from tests.builders.terms import terms


def opening(
    screen: FakeScreen, noted: Interrupts | None = None, serve=lambda longest_s: None
) -> RunLoop:
    seconds = itertools.count()  # a second each time that the clock is looked at

    def clock() -> float:
        return float(next(seconds))

    state = begin("j", ("gpu-a", "gpu-b"))
    return RunLoop(
        state,
        EventQueue(clock),
        screen,
        serve,
        noted or Interrupts(),
        clock,
        lambda: "id",
    )


class FakeFirstLinks(FirstLinks):
    """Hosts that are being reached, and what is made of their links."""

    def __init__(self, futures: list[Future[str]]) -> None:
        self.futures = futures
        self.is_cancelled = False

    def settle(self, enough: int | None, *, needs_remote: bool) -> dict[int, str]:
        return {index: future.result() for index, future in enumerate(self.futures)}

    def interrupted(self) -> Cancelled:
        return Cancelled("Interrupted while the hosts were being reached.")

    def cancel(self) -> None:
        self.is_cancelled = True


def phases(state: RunState) -> list[str]:
    return [node.phase for node in state.nodes]


def test_hosts_are_shown_as_they_answer():
    links: list[Future[str]] = [Future(), Future()]
    steps = [lambda: links[1].set_result("b"), lambda: links[0].set_result("a")]
    screen = FakeScreen(lambda _: steps and steps.pop(0)())
    shown = opening(screen)
    assert connect.connect(shown, FakeFirstLinks(links), None) == {0: "a", 1: "b"}
    seen = [phases(state) for state in screen.shown]
    assert seen == [
        ["connecting", "connecting"],
        ["connecting", "connected"],
        ["connected", "connected"],
    ]
    assert phases(shown.state) == ["connected", "connected"]
    assert screen.finished == []


def test_a_host_that_can_not_be_used_is_shown_while_others_are_waited_for():
    links: list[Future[str]] = [Future(), Future()]
    links[0].set_exception(Unreachable("gpu-a", "port 22 refused the connection."))
    screen = FakeScreen(
        lambda state: links[1].set_result("b") if len(screen.shown) == 2 else None
    )
    with pytest.raises(Unreachable):
        connect.connect(opening(screen), FakeFirstLinks(links), None)
    assert [state.nodes[0].unusable for state in screen.shown] == 3 * [
        "gpu-a: port 22 refused the connection."
    ]


def test_events_are_folded_while_a_result_is_waited_for():
    future: Future[None] = Future()
    sent = iter((10, 20))

    def send(state: RunState) -> None:
        size = next(sent, None)
        if size is None and not future.done():
            future.set_result(None)
        elif size is not None:
            loop.queue.tell(Sending(sent_bytes=size, total_bytes=20), node_rank=1)

    screen = FakeScreen(send)
    loop = opening(screen)
    loop.note(Warned(text="gpu-a: old torch"))
    loop.wait_for([future])
    assert [state.nodes[1].sent_bytes for state in screen.shown] == [0, 10, 20, 20]
    assert {state.notices for state in screen.shown} == {("gpu-a: old torch",)}


def test_what_a_future_raises_is_raised_when_the_user_has_seen_how_it_ended():
    future: Future[None] = Future()
    future.set_exception(Unreachable("gpu-a", "gone.", "Look there."))
    screen = FakeScreen()
    what = opening(screen)
    with pytest.raises(Unreachable, match=r"gpu-a: gone\."), what.opening():
        what.result(future)
    assert [(s.phase, s.is_over, s.abandoned) for s in screen.finished] == [
        ("failed", True, "gpu-a: gone.")
    ]


@pytest.mark.parametrize("times", [1, 3])
def test_a_signal_is_heeded_between_two_looks_and_becomes_cancelled(times, golden):
    """It never is raised in the middle of something, so nothing that was begun can get lost."""
    whole = []

    def press(_: RunState) -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        whole.append(True)

    screen = FakeScreen(press)
    with interrupts.noted() as noted:
        what = opening(screen, noted)
        with (
            golden.raises(Cancelled) as caught,
            what.opening(),
        ):
            what.result(Future())
    assert whole == [True]
    assert [(s.phase, s.abandoned) for s in screen.finished] == [
        ("stopped", caught.value.message)
    ]


def test_what_made_an_interrupt_its_own_error_keeps_its_words():
    screen = FakeScreen()
    with pytest.raises(Cancelled, match=r"^Own words\.$"), opening(screen).opening():
        raise Cancelled("Own words.")
    assert [state.abandoned for state in screen.finished] == ["Own words."]


def test_a_question_is_given_up_at_once():
    def serve(_: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the question went on")

    with interrupts.noted() as noted, pytest.raises(KeyboardInterrupt):
        opening(FakeScreen(), noted, serve).wait_for([Future()])
    assert noted.count == 0


def test_a_host_that_is_absent_is_no_node():
    screen = FakeScreen()
    shown = opening(screen)
    shown.note(
        Planned(addresses=("10.0.0.2",), terms=terms(0, min_nodes=1), present=(1,))
    )
    assert [
        (node.node_rank, node.host, node.address) for node in shown.state.nodes
    ] == [(0, "gpu-b", "10.0.0.2")]


def test_a_run_that_is_over_pauses_between_two_looks():
    loop = opening(FakeScreen())
    loop.note(Abandoned(why="lost", is_wish=False))
    sweep: Future[None] = Future()
    pauses_s = []

    def batch(timeout_s: float) -> list[object]:
        pauses_s.append(timeout_s)
        if len(pauses_s) == 3:
            sweep.set_result(None)
        return []

    loop.queue.batch = batch
    loop.wait_for([sweep])
    assert pauses_s == [0.0, BEAT_S, BEAT_S, 0.0]
