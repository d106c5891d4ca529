"""Ranks that another kernel has left while they ran a cell."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from distmagic.errors import UsageError
from distmagic.notebook import job_commands
from distmagic.remote.wire import protocol as p
from distmagic.render.screen import Screen
from distmagic.request.flags import Request
from distmagic.state.events import Event
from distmagic.state.fold import begin, fold
from distmagic.staying.control import Control
from distmagic.staying.idle import IdleTime
from distmagic.staying.ranks import Ranks
from tests.builders.events import HOSTS, at, hello, worker

BOTH = (0, 1)


class InterruptedScreen(Screen):
    """The user interrupts once."""

    def __init__(self) -> None:
        self.asked: list[Any] = ["stop"]
        self.last: Any = None

    def requests(self) -> tuple[Any, ...]:
        found, self.asked = tuple(self.asked), []
        return found

    def finish(self, state: Any) -> None:
        self.last = state


class Hosts:
    """The loop of a session: it answers each request to ranks at once."""

    def __init__(self) -> None:
        events = [hello(0), hello(1), worker(0, world=2), worker(1, 1, world=2)]
        state = fold(begin("j", HOSTS), events)
        self.run: Any = SimpleNamespace(
            state=state, done=False, job="j", stacks=lambda: None, open_link=None
        )
        self.run.screen = SimpleNamespace(has_changed=threading.Condition())
        self.control = Control(60.0)
        self.control.join(self.answer)
        self.asked: list[Any] = []
        self.link: Any = SimpleNamespace(python=(3, 12))
        self.ignored: set[int] = set()  # ranks that have begun another kernel's cell

    def answer(self) -> None:
        for send in self.control.sends({0: self.link}):
            message: Any = send.message
            self.asked.append(message)
            for rank in message.ranks:
                self.report(message, rank)

    def report(self, message: Any, rank: int) -> None:
        cell = message.cell
        if isinstance(message, p.ParkAtStep):
            count = p.StepCount(cell=cell, rank=rank, steps=0, iterations=0, idle_s=0.0, step_s=0.0)  # fmt: skip
            self.control.hear([at(count, rank)])
        elif isinstance(message, p.InterruptCell):
            self.end(cell, rank, "signalled", code=-2)
        elif isinstance(message, p.RunCell) and message.data:
            is_other = rank in self.ignored
            self.begin(cell, rank, "another" if is_other else message.kernel)
            if is_other or not self.ignored:
                self.end(cell, rank, "returned")

    def begin(self, cell: int, rank: int, kernel: str = "") -> None:
        began = p.CellBegan(cell=cell, rank=rank, is_users=True, kernel=kernel)
        self.control.hear([at(began, rank)])

    def end(self, cell: int, rank: int, outcome: Any, **more: Any) -> None:
        ended = p.Ended(rank=rank, restart=0, outcome=outcome, **more)
        self.control.hear([at(p.CellEnded(cell=cell, rank=rank, ended=ended), rank)])


class LaterScreen(Screen):
    """Time goes on whenever it is shown."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.at_s = 5.0
        self.last: Any = None

    def show(self, _: Any) -> None:
        self.at_s += 1.0
        self.hosts.control.hear([Event(node_rank=0, at_s=self.at_s, what=None)])
        if self.told():
            self.hosts.end(7, 1, "returned")

    def told(self) -> list[Any]:
        return [one for one in self.hosts.asked if isinstance(one, p.OthersEnded)]

    def finish(self, state: Any) -> None:
        self.last = state


def ranks_on(hosts: Hosts) -> Ranks:
    idle = IdleTime(60.0, lambda: 0.0)
    session: Any = SimpleNamespace()
    return Ranks(Request(stay="exp"), session, HOSTS, hosts.run, hosts.control, {}, idle)  # fmt: skip


def test_the_list_of_ranks_has_the_time_of_their_start(capsys, monkeypatch):
    monkeypatch.setattr(Ranks, "holdings", lambda _: [])
    hosts = Hosts()
    hosts.run.state = replace(hosts.run.state, began_unix_s=86_400.0)
    notebook = SimpleNamespace(ranks={"exp": ranks_on(hosts)}, say=print)
    job_commands.stay(SimpleNamespace(notebook=notebook, words=()))  # type: ignore[arg-type]
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "<ranks exp: 2 on gpu-a, gpu-b, running, 0 cells>"
    assert re.fullmatch(r"  since Jan \d, \d\d:\d\d", second)


def test_a_kernel_that_attaches_can_interrupt_the_cell_that_still_runs(capsys):
    hosts = Hosts()
    ranks = ranks_on(hosts)
    for rank in BOTH:
        hosts.begin(7, rank)
    screen = InterruptedScreen()
    ranks.take_over(screen)
    assert "Of the ranks of exp, 0-1 still run a cell" in capsys.readouterr().out
    of_cell = [one for one in hosts.asked if one.cell == 7]
    assert of_cell[1:] == [
        p.ParkAtStep(cell=7, ranks=BOTH),
        p.InterruptCell(cell=7, ranks=BOTH),
    ]
    # Ranks ignore the first one, which only names the cell.
    assert of_cell[0] == p.RunCell(cell=7, ranks=BOTH)
    assert screen.last.is_over
    assert [one.cell for one in hosts.asked] == [7, 7, 7, 8]


@pytest.mark.parametrize("has_failed", [False, True], ids=["returned", "raised"])
def test_ranks_are_told_of_one_that_ended_the_cell_while_no_kernel_was_there(
    has_failed,
):
    hosts = Hosts()
    ranks = ranks_on(hosts)
    for rank in BOTH:
        hosts.begin(7, rank)
    failure = p.Failure(type="ValueError", message="no", traceback="")
    if has_failed:
        hosts.end(7, 0, "raised", code=1, failure=failure)
    else:
        hosts.end(7, 0, "returned")
    screen = LaterScreen(hosts)
    ranks.take_over(screen)
    assert screen.told() == [p.OthersEnded(cell=7, ranks=(1,), ended=(0,))]
    assert screen.last.phase == ("failed" if has_failed else "done")
    interrupts = [one for one in hosts.asked if isinstance(one, p.InterruptCell)]
    interrupt = p.InterruptCell(cell=7, ranks=(1,), failed=0)
    assert interrupts == ([interrupt] if has_failed else [])


@pytest.mark.parametrize(
    ("ignored", "interrupted"), [((0, 1), []), ((1,), [(0,)])], ids=["all", "one"]
)
def test_a_cell_in_whose_place_ranks_run_one_of_another_kernel_fails(
    ignored, interrupted, golden
):
    hosts = Hosts()
    ranks = ranks_on(hosts)
    ranks.keep()
    hosts.ignored = set(ignored)
    for _ in range(2):
        with golden.raises(UsageError):
            ranks.keep()
    stops = [one.ranks for one in hosts.asked if isinstance(one, p.InterruptCell)]
    assert stops == interrupted
    assert [one.cell for one in hosts.asked if isinstance(one, p.RunCell)] == [1, 2]
    hosts.ignored = set()
    ranks.take_over(Screen())
    assert ranks.state.phase == "running"
