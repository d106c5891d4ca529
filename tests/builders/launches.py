"""A launch that is a script of events, with a clock of its own."""

from __future__ import annotations

from distmagic.remote.wire import protocol as p
from distmagic.state.events import Event, Gone
from distmagic.state.model import RunState
from tests.builders.events import at, hello, worker

START = [hello(0), hello(1), *(worker(rank, rank // 2, local=rank % 2) for rank in range(4))]


class FakeLaunch:
    """A launch that plays a script: each step is a list of events, or an interrupt, and takes `step_s`."""

    def __init__(self, *script: list[Event] | type[KeyboardInterrupt], step_s: float = 0.5) -> None:
        self.script, self.step_s = list(script), step_s
        self.elapsed_s = 0.0
        self.asks = 0
        self.stops: list[tuple[list[int], float, str]] = []

    def batch(self, timeout_s: float) -> list[Event]:
        self.elapsed_s += self.step_s
        step = self.script.pop(0) if self.script else []
        if step is KeyboardInterrupt:
            raise KeyboardInterrupt
        return step

    def ask_stacks(self) -> str:
        self.asks += 1
        return f"ask{self.asks}"

    def stop(self, node_ranks: list[int], grace_s: float, reason: str) -> None:
        self.stops.append((list(node_ranks), grace_s, reason))


class FakeScreen:
    def __init__(self) -> None:
        self.shown: list[RunState] = []

    def show(self, state: RunState) -> None:
        self.shown.append(state)


def end_of(node: int, code: int = 0, reason: str = "done") -> list[Event]:
    return [at(what, node) for what in (p.EngineEnded(code=code), p.Final(reason=reason), Gone())]
