"""Drives a run to its end on the main thread: fold what came, decide, show. Interrupts arrive here.

What to do next is decided by `decide`, a pure function of the state.
"""

from __future__ import annotations

from typing import Protocol

from distmagic.fold import fold
from distmagic.launch import Launch
from distmagic.state import Event, Lost, RunState, Stopping

GRACE_S = 3.0  # between SIGTERM and SIGKILL, after a failure or a first interrupt
CLOSED_PORT_S = 5.0  # the endpoint is open for this long, and a node still can't dial it
NEVER_OPEN_S = 120.0  # the endpoint has not opened at all; importing torch can take long on a slow disk
CONFIRM_S = 15.0  # a node that hasn't confirmed its end this long after SIGKILL is lost
_BEAT_S = 0.1


class Screen(Protocol):
    """Where a run is shown."""

    def show(self, state: RunState) -> None:
        """Show a state; called on the main thread, at most 10 times a second."""

    def finish(self, state: RunState) -> None:
        """Show the last state for good."""


def decide(state: RunState, timeout_s: float | None) -> str:
    """Return why the run must be stopped now, "" if it goes on."""
    if state.stopping or state.is_over:
        return ""
    if timeout_s is not None and state.at_s > timeout_s:
        return "timeout"
    if state.lost:
        return "lost"
    if _closed_port(state):
        return "rendezvous"
    given_up = any(node.code not in (None, 0) for node in state.nodes)
    return "failed" if given_up or (state.first_failure is not None and not state.max_restarts) else ""


def _closed_port(state: RunState) -> bool:
    if not state.unreached:
        return False
    opened = state.endpoint_open_at_s
    return state.at_s > NEVER_OPEN_S if opened is None else state.at_s - opened > CLOSED_PORT_S


def drive(launch: Launch, state: RunState, screen: Screen, timeout_s: float | None) -> RunState:
    """Return the last state of a run: every node is gone, or lost."""
    pilot = _Pilot(launch, state, screen, timeout_s)
    while not pilot.state.is_over:
        try:
            pilot.beat()
        except KeyboardInterrupt:
            pilot.interrupt()
    return pilot.state


class _Pilot:
    def __init__(self, launch: Launch, state: RunState, screen: Screen, timeout_s: float | None) -> None:
        self.launch, self.state, self.screen, self.timeout_s = launch, state, screen, timeout_s
        self.give_up_at_s: float | None = None
        self.shown_at_s = -1.0

    def beat(self) -> None:
        """One step: wait for events at most a tenth of a second, fold, decide, show."""
        events = self.launch.batch(_BEAT_S)
        now = self.launch.elapsed_s
        self.state = fold(self.state, [*events, Event(node_rank=0, at_s=now, what=None)])
        reason = decide(self.state, self.timeout_s)
        if reason:
            self.stop(reason, GRACE_S)
        if self.give_up_at_s is not None and now > self.give_up_at_s:
            self.give_up()
        if now - self.shown_at_s >= _BEAT_S:
            self.shown_at_s = now
            self.screen.show(self.state)

    def interrupt(self) -> None:
        """The first asks politely, the second ends at once."""
        self.stop("interrupted", 0.0 if self.state.stopping else GRACE_S)

    def stop(self, reason: str, grace_s: float) -> None:
        now = self.launch.elapsed_s
        self.state = fold(self.state, [Event(node_rank=0, at_s=now, what=Stopping(reason=reason))])
        self.give_up_at_s = now + grace_s + CONFIRM_S
        self.launch.stop(self._answering(), grace_s, reason)

    def _answering(self) -> list[int]:
        lost = {node for node, _ in self.state.lost}
        return [n.node_rank for n in self.state.nodes if n.phase != "gone" and n.node_rank not in lost]

    def give_up(self) -> None:
        """Count nodes that don't confirm as lost."""
        lost = [
            Event(node_rank=i, at_s=self.state.at_s, what=Lost(why="it did not confirm its end"))
            for i in self._answering()
        ]
        self.state = fold(self.state, lost)
