"""Drives a run to its end on the main thread: fold what came, decide, show. Interrupts arrive here.

What to do next is decided by `decide`, a pure function of the state.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from distmagic.remote.wire.vocabulary import StopReason
from distmagic.runner import interrupts
from distmagic.runner.interrupts import Interrupts
from distmagic.runner.launch import Launch
from distmagic.state.events import Event, Lost, StopRequested
from distmagic.state.fold import UNHEARD, fold
from distmagic.state.hang_response import HangResponse
from distmagic.state.model import RunState

GRACE_S = 3.0  # between SIGTERM and SIGKILL, after a failure or a first interrupt
CLOSED_PORT_S = 5.0  # the endpoint is open for this long, and a node still can't dial it
NEVER_OPEN_S = 120.0  # the endpoint has not opened at all; importing torch can take long on a slow disk
NODE_LOST_S = 10.0  # a host that only this notebook can't reach is lost after this long; if it is all, the lease counts
OWN_WORD_S = 1.5  # for a host that the others don't hear to say that it doesn't hear them
CONFIRM_S = 15.0  # a node that hasn't confirmed its end this long after SIGKILL is lost
ABANDON_S = 5.0  # how long an unexpected error waits for the ranks to be gone
_BEAT_S = 0.1


class Screen(Protocol):
    """Where a run is shown."""

    def show(self, state: RunState) -> None:
        """Show a state; called on the main thread, at most 10 times a second."""

    def finish(self, state: RunState) -> None:
        """Show the last state for good: nothing of the live view is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run is ended at: its whole time since it was started, and the time in which no rank advances."""

    timeout_s: float | None = None
    hang_timeout_s: float | None = None


def decide(state: RunState, timeout_s: float | None, *, detach: bool = False) -> StopReason | Literal[""]:
    """Return why the run must be stopped now, or why it is being stopped; "" if it goes on."""
    if state.stopping or state.is_over:
        return state.stopping
    if timeout_s is not None and state.at_s - (state.started_at_s or 0.0) > timeout_s:
        return "timeout"
    if detach and any(node.gang == "silent" for node in state.nodes):
        return "gang"
    if state.is_lost:
        return "lost"
    if _closed_port(state):
        return "rendezvous"
    given_up = any(node.code not in (None, 0) for node in state.essential)
    return "failed" if given_up or (state.first_failure is not None and not state.max_restarts) else ""


def overdue(state: RunState) -> tuple[int, ...]:
    """Return the nodes that have been out of reach for too long while others are not: their hosts are down.

    A node that its own gang hears is not among them, wherever this notebook's cable is broken.
    """
    lost = state.lost_nodes
    there = [node for node in state.nodes if node.phase != "gone" and node.node_rank not in lost]
    others_lost_it = any(node.stopping == "lost" for node in state.nodes)
    if all(node.broken for node in there) and not others_lost_it:
        return ()
    return tuple(
        n.node_rank
        for n in there
        if n.broken and state.at_s - n.broken_at_s > NODE_LOST_S and (n.gang != "joined" or others_lost_it)
    )


def unheard(state: RunState) -> tuple[int, ...]:
    """Return the nodes that their gang misses and that have not said a word themselves since: their hosts are down."""
    return tuple(
        n.node_rank
        for n in state.nodes
        if n.accused_at_s is not None and (n.broken or state.at_s - n.accused_at_s > OWN_WORD_S)
    )


def can_detach(state: RunState) -> bool:
    """Whether every node runs, and the nodes hear each other: so that none is left alone without a notebook."""
    lost = state.lost_nodes
    there = [node for node in state.nodes if node.node_rank not in lost]
    has_begun = all(node.phase not in ("connecting", "starting") for node in there)
    return has_begun and all(node.gang == "joined" for node in there if node.node_rank != 0)


def too_late(state: RunState) -> tuple[int, ...]:
    """Return the nodes that came to an elastic job when it was over: they would wait for it for long."""
    is_over = state.is_elastic and state.nodes[0].phase == "gone" and state.nodes[0].code == 0
    lost = state.lost_nodes
    waiting = [n.node_rank for n in state.nodes if n.phase != "gone" and n.node_rank not in lost] if is_over else []
    return tuple(node for node in waiting if node not in state.at_work)


def _closed_port(state: RunState) -> bool:
    waiting = [node for node in state.essential if node.node_rank in state.unreached]
    if not waiting or (state.is_elastic and len(state.essential) - len(waiting) >= state.min_nodes):
        return False
    opened = state.endpoint_open_at_s
    return (
        state.at_s - (state.started_at_s or 0.0) > NEVER_OPEN_S
        if opened is None
        else state.at_s - opened > CLOSED_PORT_S
    )


def drive(
    launch: Launch, state: RunState, screen: Screen, serve: Callable[[float], None], limits: Limits,
    noted: Interrupts | None = None, *, detach: bool = False,
) -> RunState:  # fmt: skip
    """Return the last state of a run: every node is gone, or lost.

    `detach`: lets the job go on alone as soon as it runs, and returns the state then. An interrupt does the same to a
    job that is detached already. `serve` answers questions of connections that are made again (a one-time password), on
    this thread. `noted` are the interrupts so far, where the caller notes them already.
    """
    noted = noted or Interrupts()
    pilot = _Pilot(launch, state, screen, serve, limits, noted, detach=detach)
    try:
        with _heap_left_alone(), interrupts.sent_to(noted):  # raised in the middle, an event could get lost
            while not pilot.is_done:
                pilot.beat_or_count()
    except BaseException:  # a bug, of a screen say: the ranks must not go on until their lease runs out
        pilot.abandon()
        raise
    return pilot.state


@contextmanager
def _heap_left_alone() -> Iterator[None]:
    """Keep the garbage collector from the notebook's own objects meanwhile.

    A thousand ranks at 10 Hz make it look through all that lives several times a second: a third of the whole cost.
    """
    if gc.get_freeze_count():  # somebody else's decision
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Pilot:
    def __init__(
        self, launch: Launch, state: RunState, screen: Screen, serve: Callable[[float], None],
        limits: Limits, noted: Interrupts, *, detach: bool,
    ) -> None:  # fmt: skip
        self.detach, self.has_left = detach, False
        self.launch, self.state, self.screen, self.serve, self.timeout_s = (
            launch,
            state,
            screen,
            serve,
            limits.timeout_s,
        )
        self.hang_response = HangResponse(launch.ask_stacks, limits.hang_timeout_s)
        self.give_up_at_s: float | None = None
        self.late: set[int] = set()
        self.shown_at_s = -1.0
        self.interrupts = noted

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to follow, or nobody wants to."""
        return self.state.is_over or self.has_left or (self.detach and bool(self.state.detached_by))

    def beat(self) -> None:
        """One step: wait for events at most a tenth of a second, fold, decide, show."""
        events = self.launch.batch(_BEAT_S)
        self.interrupts.ask(self.serve)
        while self.interrupts.take():
            self.interrupt()
        now = self.launch.elapsed_s
        self.state = fold(self.state, [*events, Event(node_rank=0, at_s=now, what=None)])
        self.count_lost(overdue(self.state), f"it could not be reached for {NODE_LOST_S:g} s")
        self.count_lost(unheard(self.state), UNHEARD)
        if late := [node for node in too_late(self.state) if node not in self.late]:
            self.late.update(late)
            self.launch.stop(late, 0.0, "too late")
        reason = decide(self.state, self.timeout_s, detach=self.detach) or self.hang_response.poll(self.state)
        if reason and self.give_up_at_s is None:
            self.stop(reason, GRACE_S)
        elif self.detach and can_detach(self.state):
            self.launch.detach()
        if self.give_up_at_s is not None and now > self.give_up_at_s:
            self.give_up()
        if now - self.shown_at_s >= _BEAT_S:
            self.shown_at_s = now
            self.screen.show(self.state)

    def beat_or_count(self) -> None:
        """Beat; an interrupt that was raised all the same (of a thread that has no signals, say) counts too."""
        try:
            self.beat()
        except KeyboardInterrupt:
            self.interrupts()

    def abandon(self) -> None:
        """Stop everything at once, and show how far it came; nothing in here may hide what was wrong."""
        self.launch.stop(self._answering(), 0.0, "abandoned")
        end = self.launch.elapsed_s + ABANDON_S
        while not self.state.is_over and self.launch.elapsed_s < end:
            self.state = fold(self.state, self.launch.batch(_BEAT_S))
        with suppress(Exception):
            self.screen.finish(self.state)

    def interrupt(self) -> None:
        """The first asks politely, the second ends at once. A detached job goes on.

        Where a run has stood still, its ranks are asked where they are before.
        """
        if self.state.detached_by:
            self.has_left = True
            return
        if self.hang_response.interrupt(self.state):
            return
        self.stop("interrupted", GRACE_S if self.give_up_at_s is None else 0.0)

    def stop(self, reason: StopReason, grace_s: float) -> None:
        now = self.launch.elapsed_s
        self.state = fold(self.state, [Event(node_rank=0, at_s=now, what=StopRequested(reason=reason))])
        self.give_up_at_s = now + grace_s + CONFIRM_S
        self.launch.stop(self._answering(), grace_s, reason)

    def _answering(self) -> list[int]:
        lost = self.state.lost_nodes
        return [n.node_rank for n in self.state.nodes if n.phase != "gone" and n.node_rank not in lost]

    def give_up(self) -> None:
        """Count nodes that don't confirm as lost."""
        self.count_lost(self._answering(), "it did not confirm its end")

    def count_lost(self, node_ranks: Sequence[int], why: str) -> None:
        lost = [Event(node_rank=i, at_s=self.state.at_s, what=Lost(why=why)) for i in node_ranks]
        self.state = fold(self.state, lost)
