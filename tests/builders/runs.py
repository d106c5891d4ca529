"""A run that is a script of events, with a clock of its own: the real run loop and node table, no thread, no host."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from distmagic.remote.wire import protocol as p
from distmagic.runner.actions import Action, Linked, Send
from distmagic.runner.interrupts import Interrupts
from distmagic.runner.node_row import Growth
from distmagic.runner.node_table import NodeTable
from distmagic.runner.run_loop import RunLoop
from distmagic.state.decide import Limits
from distmagic.state.events import Event, Gone
from distmagic.state.fold import begin
from distmagic.state.model import RunState
from tests.builders.events import HOSTS, at, hello, worker
from tests.builders.terms import terms

START = [
    hello(0),
    hello(1),
    *(worker(rank, rank // 2, local=rank % 2) for rank in range(4)),
]


class FakeScreen:
    """Keeps what it was shown, and calls `act` at each state. `clicks` are what the user is going to ask for."""

    def __init__(self, act: Callable[[RunState], object] = lambda _: None) -> None:
        self.clicks: list[str] = []
        self.shown: list[RunState] = []
        self.finished: list[RunState] = []
        self._act = act

    def announce(self, text: str) -> None: ...

    def show(self, state: RunState) -> None:
        self.shown.append(state)
        self._act(state)

    def finish(self, state: RunState) -> None:
        self.finished.append(state)

    def can_type(self) -> bool:
        return False

    def requests(self) -> tuple[str, ...]:
        asked, self.clicks = tuple(self.clicks), []
        return asked


class ScriptedRun:
    """A run of two hosts: each step is a list of events, or an interrupt, and takes `step_s`.

    It is the loop's queue and its executor. `stops` are (nodes, grace in seconds, reason), `actions` all that was begun,
    `requests` those for stacks, and `asks` those of them that are not quiet.
    """

    def __init__(
        self, *script: list[Event] | type[KeyboardInterrupt], step_s: float = 0.5
    ) -> None:
        self.script, self.step_s = list(script), step_s
        self.elapsed_s = 0.0
        self.actions: list[Action] = []
        self.stops: list[tuple[list[int], float, str]] = []
        self.asks = self.requests = 0
        self._links: dict[int, Any] = {}

    def run(
        self,
        limits: Limits | None = None,
        screen: FakeScreen | None = None,
        restarts: int = 0,
        *,
        detach: bool = False,
    ) -> RunState:
        """Follow it to its end, and return the last state."""
        numbers = itertools.count(1)

        def new_id() -> str:
            return f"ask{self.requests + 1}"

        def clock() -> float:
            return self.elapsed_s

        state = begin("j", HOSTS, terms(restarts))
        loop = RunLoop(
            state,
            self,
            screen or FakeScreen(),
            lambda longest_s: None,
            Interrupts(),
            clock,
            new_id,
        )
        self._links = {
            node: SimpleNamespace(agent_error="", kept=None)
            for node in range(len(HOSTS))
        }
        table = NodeTable(
            range(len(HOSTS)),
            60.0,
            lambda: f"join{next(numbers)}",
            Growth(host_names=(*HOSTS, "gpu-c")),
        )
        loop.follow(table, self, self._links, limits or Limits(), detach=detach)
        return loop.state

    # ---- the queue

    def batch(self, timeout_s: float) -> list[Event]:
        self.elapsed_s += self.step_s
        step = self.script.pop(0) if self.script else []
        if step is KeyboardInterrupt:
            raise KeyboardInterrupt
        events: list[Event] = []
        for event in step:
            events.append(event)
            # Another notebook starts it, and this one follows it at once.
            if isinstance(event.what, p.NodeAdded):
                node_rank = len(self._links)
                self._links[node_rank] = SimpleNamespace(agent_error="", kept=None)
                events.append(at(Linked(link=self._links[node_rank]), node_rank))
        return events

    # ---- the executor

    def perform(self, action: Action) -> None:
        self.actions.append(action)
        if isinstance(action, Send) and isinstance(action.message, p.StopNode):
            nodes = [
                node
                for node, link in self._links.items()
                if any(link is one for one in action.links)
            ]
            self.stops.append((nodes, action.message.grace_s, action.message.reason))
        if isinstance(action, Send) and isinstance(action.message, p.DumpStacks):
            self.requests += 1
            self.asks += not action.message.quietly

    def keep_lease_over(self, links: tuple[Any, ...]) -> None:
        pass


def end_of(node: int, code: int = 0, reason: str = "done") -> list[Event]:
    return [
        at(what, node)
        for what in (p.EngineEnded(code=code), p.Final(reason=reason), Gone())
    ]
