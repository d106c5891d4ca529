"""Whether ranks that were asked to end are waited for, and which signal they get."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distmagic.remote.agent import polite_stop
from distmagic.remote.agent.polite_stop import PoliteStop
from distmagic.remote.system import awake, processes
from tests.lab.waiting import wait_until

BEGAN = 100.0


class Host:
    """Ranks that are not there: the signals that they handle, whether they run Python, and what they were sent."""

    def __init__(self) -> None:
        self.handled: dict[int, set[int]] = {}
        self.runs_python: set[int] = set()
        self.answered: set[int] = set()

    def rank(self, pid: int, *handled: int, is_over: bool = False) -> Any:
        self.handled[pid] = {awake.SIGNAL, *handled}
        return SimpleNamespace(
            process=SimpleNamespace(pid=pid),
            hello=SimpleNamespace(pid=pid),
            is_running=True,
            is_over=is_over,
            over_at=math.inf,
        )

    def send(self, process: Any, number: int) -> None:
        assert number == awake.SIGNAL
        if process.pid in self.runs_python:
            self.answered.add(process.pid)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host()
    monkeypatch.setattr(
        processes, "catches", lambda pid, number: number in made.handled[pid]
    )
    monkeypatch.setattr(processes, "send", made.send)
    monkeypatch.setattr(awake, "has_answered", lambda _, pid: pid in made.answered)
    return made


def seconds_waited(
    stop: PoliteStop, ranks: list[Any], limit_s: float = 60.0, **more: bool
) -> float:
    """Return when the agent would kill the ranks; the limit where it goes on waiting."""
    more.setdefault("has_ending_peer", False)
    for tick in range(int(limit_s * 10)):
        if stop.look(ranks, BEGAN + tick / 10, **more):
            return tick / 10
    return limit_s


def test_ranks_that_all_wait_in_c_are_not_waited_for(host):
    ranks = [host.rank(1), host.rank(2)]
    assert seconds_waited(PoliteStop(Path(), BEGAN), ranks) == pytest.approx(3.1)


def test_one_that_runs_python_is_waited_for_with_all_others(host):
    ranks = [host.rank(1), host.rank(2)]
    host.runs_python = {2}
    stop = PoliteStop(Path(), BEGAN)
    assert seconds_waited(stop, ranks) == 60.0
    assert stop.is_ending


def test_a_rank_that_saves_in_c_after_it_was_asked_is_waited_for(host):
    ranks = [host.rank(1)]
    host.runs_python = {1}
    stop = PoliteStop(Path(), BEGAN)
    assert not stop.look(ranks, BEGAN + 0.5, has_ending_peer=False)
    host.runs_python = set()
    assert seconds_waited(stop, ranks) == 60.0


def test_a_rank_whose_wait_in_c_ends_late_is_waited_for_from_then_on(host):
    ranks = [host.rank(1), host.rank(2)]
    host.runs_python = {1}
    stop = PoliteStop(Path(), BEGAN)
    assert seconds_waited(stop, ranks, 10.0) == 10.0
    ranks[
        0
    ].is_running = False  # it has ended, so the other one sees its connection close
    host.runs_python = {2}
    for after_s in (11.0, 11.5):  # it is asked, and has answered at the next look
        assert not stop.look(ranks, BEGAN + after_s, has_ending_peer=False)
    assert stop.is_ending


def test_a_rank_of_another_host_is_waited_for(host):
    stop = PoliteStop(Path(), BEGAN)
    assert seconds_waited(stop, [host.rank(1)], has_ending_peer=True) == 60.0
    assert not stop.is_ending


def test_what_a_rank_does_at_its_exit_counts_only_where_it_ended_now(host):
    rank = host.rank(1, is_over=True)
    rank.over_at = BEGAN + 0.2
    assert seconds_waited(PoliteStop(Path(), BEGAN), [rank]) == 60.0
    rank.over_at = BEGAN - 5.0
    assert seconds_waited(PoliteStop(Path(), BEGAN), [rank]) == pytest.approx(3.1)


def test_a_rank_that_has_become_another_program_is_waited_for(host):
    rank = host.rank(1)
    host.handled[1] = {signal.SIGINT}
    assert seconds_waited(PoliteStop(Path(), BEGAN), [rank]) == 60.0


@pytest.mark.parametrize(
    ("reason", "handled", "number"),
    [
        ("interrupted", (), signal.SIGINT),
        ("interrupted", (signal.SIGTERM,), signal.SIGINT),
        ("stopped", (signal.SIGTERM,), signal.SIGINT),
        ("terminated", (signal.SIGTERM,), signal.SIGTERM),
        ("terminated", (), signal.SIGINT),
        ("timeout", (signal.SIGTERM,), signal.SIGTERM),
        ("timeout", (), signal.SIGINT),
        ("the agent was asked to end", (signal.SIGTERM,), signal.SIGTERM),
    ],
)
def test_an_interrupt_is_one_and_sigterm_goes_to_those_that_handle_it(
    host, reason, handled, number
):
    ranks = [host.rank(1), host.rank(2, *handled)]
    assert polite_stop.signal_for(reason, ranks) == number


@pytest.mark.parametrize("reason", ["failed", "lost", "rendezvous", "abandoned"])
def test_after_a_failure_nobody_is_asked(host, reason):
    assert not polite_stop.is_possible(reason, [host.rank(1)])
    assert polite_stop.is_possible("interrupted", [host.rank(1)])
    assert not polite_stop.is_possible("interrupted", [])


_RANK = """
import sys, time, pathlib
from distmagic.remote.system import awake
awake.answer(pathlib.Path(sys.argv[1]))
print("up", flush=True)
time.sleep(1000)
"""


def test_a_process_answers_between_two_steps_of_python(tmp_path):
    """Also where interrupts are ignored, as a shell has it for what it starts in the background."""
    with subprocess.Popen(
        [
            *("/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh"),
            *(sys.executable, "-c", _RANK, str(tmp_path)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        assert processes.catches(child.pid, awake.SIGNAL)
        assert not processes.catches(child.pid, signal.SIGTERM)
        assert not awake.has_answered(tmp_path, child.pid)
        os.kill(child.pid, awake.SIGNAL)
        wait_until(lambda: awake.has_answered(tmp_path, child.pid), "the answer")
        child.send_signal(signal.SIGINT)
        assert child.wait(60) != 0
    assert not processes.catches(child.pid, awake.SIGNAL)
