"""The loop of a run, on the run's own thread: folds events, asks questions, handles interrupts,
decides, and shows the run.

Only the loop changes the state of a run. Three things happen elsewhere: before a loop exists,
session/ shows its own state and FirstLinks asks questions; and start.roll_back ignores interrupts
within its time limits.

    threads  --events-->  EventQueue  --step-->  RunState, NodeTable
    RunState  --state/decide-->  decisions
    decisions, and NodeTable's retries  -->  actions  --Executor-->  threads

A run goes through these stages:

    opening     `wait_for` one blocking action after the other: connect to hosts, plan, send, start.
                An interrupt raises KeyboardInterrupt out of `wait_for`
    following   `follow`: events are folded and decided upon until every node is gone or lost.
                An interrupt stops the nodes politely, the next one at once; a detached job runs on.
                If a run has long been without progress, the first one asks for the ranks' stacks;
                the stop follows by itself
    closing     `wait_for` the cleanup after lost agents

Promised: an interrupt loses no event. Not promised: that a step takes at most 0.1 s, because the
user may answer a question within it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from distmagic.connection.link import Link
from distmagic.errors import Cancelled, DistmagicError
from distmagic.remote.system.gc_pause import heap_left_alone
from distmagic.remote.wire import protocol
from distmagic.remote.wire.vocabulary import StopReason
from distmagic.render.screen import Screen, TypedLine, UserRequest
from distmagic.runner import interrupts
from distmagic.runner.actions import Action, Note, Send
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.executor import Executor
from distmagic.runner.interrupts import Interrupts
from distmagic.runner.node_table import NodeTable
from distmagic.state import decide
from distmagic.state.decide import (
    AskForStacks,
    Decided,
    Leave,
    Limits,
    Lose,
    RunMemory,
    Stop,
    StopLate,
)
from distmagic.state.events import (
    Abandoned,
    Event,
    Launched,
    Lost,
    StacksWanted,
    StopRequested,
    Warned,
)
from distmagic.state.fold import fold
from distmagic.state.model import RunState

ABANDON_S = 5.0  # how long an unexpected error waits for the end of the ranks
BEAT_S = 0.1
# A warm run has asked its hosts before this; drawing earlier would only delay it.
_FIRST_SHOWN_S = 0.01
SHORT_S = 5.0  # a run that lasts longer justifies a full garbage collection

T = TypeVar("T")


class Companion(Protocol):
    """What a run's loop calls in each turn besides its own work: the control of ranks that stay
    (`%%ranks`).

    The loop's thread calls `hear` and `sends`. `ends_idle_s`: the hosts end the ranks after this
    many seconds without a cell, even without a notebook. None: the ranks end with their notebook.
    """

    ends_idle_s: float | None

    def join(self, wake: Callable[[], None]) -> None:
        """Receive the function that wakes the loop."""

    def hear(self, events: Sequence[Event]) -> None:
        """Receive the events that were just folded."""

    def sends(self, links: Mapping[int, Link]) -> list[Send]:
        """Return the messages to send now; `links` are by node."""


@dataclass(eq=False)
class RunLoop:
    """The loop of one run. It runs on the main thread, or on its own thread for a background run.

    `clock` gives the seconds since the start of the run, `serve` answers one question of a
    connection, `new_id` makes the ID of a request.
    """

    state: RunState
    queue: EventQueue
    _screen: Screen
    _serve: Callable[[float], None]
    interrupts: Interrupts
    _clock: Callable[[], float]
    _new_id: Callable[[], str]
    _companion: Companion | None = None
    _next_shown_s: float = field(init=False)
    # The following attributes are for `follow`, which sets the first two.
    _table: NodeTable = field(init=False)
    _executor: Executor = field(init=False)
    _memory: RunMemory = field(default_factory=RunMemory)
    # By rank: the line of input that it waits for, and the link over which it was sent.
    _typed: dict[int, tuple[TypedLine, Link | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._next_shown_s = self._clock() + _FIRST_SHOWN_S
        if self._companion is not None:
            self._companion.join(self.queue.wake)

    # ---- every stage

    def note(self, *what: Launched, node_rank: int = 0) -> None:
        """Fold events about the whole run, or about one node."""
        self.note_all((one, node_rank) for one in what)

    def note_all(self, pairs: Iterable[tuple[Launched, int]]) -> None:
        """Fold events about nodes, each with its node rank.

        Folding many costs as much as folding one.
        """
        events = [
            Event(node_rank=node_rank, at_s=self._clock(), what=one)
            for one, node_rank in pairs
        ]
        self._fold(events)

    def step(self, timeout_s: float = BEAT_S, *, asks: bool = True) -> list[Event]:
        """Answer a question if `asks`, wait at most `timeout_s` for events, and fold them; return
        the events.
        """
        if asks:
            # Before events are taken: an interrupt in between must lose none.
            self.interrupts.ask(self._serve)
        events = self.queue.batch(timeout_s)
        if not self.state.is_over:  # the clock stops when a run is over
            events.append(Event(node_rank=0, at_s=self._clock(), what=None))
        self._fold(events)
        return events

    def _fold(self, events: Sequence[Event]) -> None:
        self.state = fold(self.state, events)
        if self._companion is not None:
            self._companion.hear(events)

    def show(self) -> None:
        """Show the state, at most ten times a second."""
        now_s = self._clock()
        if now_s >= self._next_shown_s:
            self._next_shown_s = now_s + BEAT_S
            self._screen.show(self.state)

    def finish(self) -> None:
        """Show the last state of a finished run, for good."""
        if self.state.is_over:
            self._screen.finish(self.state)

    # ---- opening and closing

    def wait_for(
        self, futures: Sequence[Future[Any]], limit_s: float = math.inf
    ) -> None:
        """Return when all futures are done, or after `limit_s`.

        The caller looks at the futures' errors. Raises KeyboardInterrupt for an interrupt.
        """
        done: list[None] = []
        queue = self.queue

        def wake(_: Future[Any]) -> None:
            done.append(None)
            queue.wake()

        # A future never drops its callbacks. So they refer neither to futures nor to this loop:
        # that reference cycle would keep everything about the run alive.
        for future in futures:
            # After callbacks that queue an event, so that none is left for later.
            future.add_done_callback(wake)
        timeout_s = 0.0  # the first check is immediate
        end_s = self._clock() + limit_s
        while True:
            is_done = len(done) == len(futures)
            self.step(0.0 if is_done else timeout_s)
            if not self.state.is_over:
                self.show()
            # A run that is over is not shown any more.
            due_s = BEAT_S if self.state.is_over else self._next_shown_s - self._clock()
            timeout_s = max(0.0, min(BEAT_S, due_s))
            if self.interrupts.take() or "stop" in self._screen.requests():
                raise KeyboardInterrupt
            if is_done or self._clock() >= end_s:
                return

    def result(self, future: Future[T]) -> T:
        """Return the result of a future, or raise its error."""
        self.wait_for([future])
        return future.result()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """If the block ends with an error, show it as the run's end.

        An interrupt raises `Cancelled`.
        """
        try:
            yield
        except KeyboardInterrupt as interrupt:
            error = (
                interrupt
                if isinstance(interrupt, Cancelled)
                else Cancelled("Interrupted; nothing was started.")
            )
            self._abandon_opening(error.message, is_wish=True)
            raise error from None
        except BaseException as error:
            why = error.message if isinstance(error, DistmagicError) else repr(error)
            self._abandon_opening(why, is_wish=False)
            raise

    def _abandon_opening(self, why: str, *, is_wish: bool) -> None:
        self.note(Abandoned(why=why.partition("\n")[0], is_wish=is_wish))
        self._screen.finish(self.state)

    # ---- following

    def follow(
        self, table: NodeTable, executor: Executor, links: Mapping[int, Link], limits: Limits,
        *, detach: bool = False,
    ) -> None:  # fmt: skip
        """Follow all nodes until each is gone or lost, and carry out the user's requests from the
        screen.

        `links` are by node rank; nodes without a link are connected to. `detach`: detach the job as
        soon as it runs, and return then. An interrupt does the same to a detached job.
        """
        self._table = table
        self._executor = executor
        self._memory = replace(self._memory, wants_detach=detach)
        try:
            # An interrupt raised in between would lose an event.
            with ExitStack() as heap, interrupts.sent_to(self.interrupts):
                now_s = self._clock()
                freeze_at_s = math.inf
                # The notebook works on during a background run, and the objects that it frees must
                # be collected.
                if threading.current_thread() is threading.main_thread():
                    freeze_at_s = now_s + SHORT_S
                self._perform(table.follow(links, now_s))
                while not (
                    self.state.is_over or decide.is_left(self.state, self._memory)
                ):
                    if self._clock() > freeze_at_s:
                        freeze_at_s = math.inf
                        heap.enter_context(heap_left_alone())
                    # Raised anyway, for example by a thread that has no signals.
                    try:
                        self._beat(limits)
                    except KeyboardInterrupt:
                        self.interrupts()
        except BaseException:
            # A bug, for example in a screen: the ranks must not run on until their lease expires.
            self._abandon()
            raise

    def _beat(self, limits: Limits) -> None:
        while self.interrupts.take():
            self._carry_out(
                decide.after_interrupt(
                    self.state,
                    self._memory,
                    self._clock(),
                    self._new_id(),
                    "terminated" if self.interrupts.was_sigterm else "interrupted",
                )
            )
        asked: list[UserRequest] = []
        # The user may be asked for a line of input here, and interrupt that.
        self.interrupts.ask(lambda _: asked.extend(self._screen.requests()))
        for request in asked:
            # Carry out the user's requests. Stop also ends a detached job, and a second one ends it
            # at once.
            if request == "stop":
                now_s = self._clock()
                self._carry_out(
                    decide.stopped(self.state, self._memory, now_s, "interrupted")
                )
            elif request == "stacks":
                request_id = self._new_id()
                self.note(StacksWanted(request_id=request_id))
                self._ask_for_stacks(request_id)
            elif request == "detach":
                may = not self.state.terms.stays
                self._memory = replace(self._memory, wants_detach=may)
            else:
                self._typed[request.rank] = (request, None)
        actions = []
        for event in self.step():
            actions += self._table.receive(event)
        actions += self._table.due(
            self._clock(), decide.alive_elsewhere(self.state, limits)
        )
        self._perform(actions)
        self._hand_on_lines()
        if self._companion is not None:
            rows = enumerate(self._table.rows)
            links = {node: row.link for node, row in rows if row.link is not None}
            self._perform(self._companion.sends(links))
        self._carry_out(
            decide.after_step(
                self.state, limits, self._memory, self._clock(), self._new_id()
            )
        )
        self.show()

    def _carry_out(self, decided: Decided) -> None:
        """Carry out the decisions, in their order."""
        self._memory, decisions = decided
        for decision in decisions:
            if isinstance(decision, Lose):
                self.note(Lost(why=decision.why), node_rank=decision.node_rank)
            elif isinstance(decision, Stop):
                self.note(StopRequested(reason=decision.reason))
                self._send_stop(decision.node_ranks, decision.grace_s, decision.reason)
            elif isinstance(decision, StopLate):
                self._send_stop(decision.node_ranks, 0.0, "too late")
            elif isinstance(decision, AskForStacks):
                self._ask_for_stacks(decision.request_id, quietly=decision.quietly)
            elif isinstance(decision, Leave):
                self.note(Warned(text=decision.why))
            else:
                # Ask the lead to detach the job; its event confirms that.
                lead = self._table.rows[0].link
                if lead is not None:
                    self._perform([Send(links=(lead,), message=protocol.DetachJob())])

    def _hand_on_lines(self) -> None:
        """Send each line of input to the node of its rank; repeat it over a new link while the rank
        waits for it.
        """
        for rank, (line, sent_over) in list(self._typed.items()):
            paused = self.state.paused.get(rank)
            if paused is None or paused.prompt != line.prompt:
                del self._typed[rank]
                continue
            link = self._table.rows[self.state.workers[rank].node_rank].link
            if link is not None and link is not sent_over:
                self._typed[rank] = (line, link)
                message = protocol.RankInput(
                    rank=rank,
                    prompt=line.prompt,
                    text=line.text,
                    is_end=line.is_end,
                )
                self._perform([Send(links=(link,), message=message)])

    def _ask_for_stacks(self, request_id: str, *, quietly: bool = False) -> None:
        message = protocol.DumpStacks(request_id=request_id, quietly=quietly)
        self._perform([Send(links=self._table.links, message=message)])

    def _send_stop(
        self, node_ranks: Iterable[int], grace_s: float, reason: StopReason
    ) -> None:
        message = protocol.StopNode(grace_s=grace_s, reason=reason)
        self._perform(self._table.stop(node_ranks, message))

    def _perform(self, actions: Sequence[Action]) -> None:
        notes = [one for one in actions if isinstance(one, Note)]
        if notes:
            self.note_all((note.what, note.node_rank) for note in notes)
        for action in actions:
            if not isinstance(action, Note):
                self._executor.perform(action)
        self._executor.keep_lease_over(self._table.links)

    def _abandon(self) -> None:
        """Stop everything at once, and show the last state.

        Nothing in this function may hide the original error. A detached job needs no notebook, and
        runs on.
        """
        if self.state.detached_by:
            return
        self._send_stop(decide.answering(self.state), 0.0, "abandoned")
        end_s = self._clock() + ABANDON_S
        while not self.state.is_over and self._clock() < end_s:
            # The error must not wait for the user's answer.
            for event in self.step(asks=False):
                self._perform(self._table.receive(event))
        with suppress(Exception):
            self._screen.finish(self.state)


def new_clock() -> Callable[[], float]:
    """Return a clock that gives the seconds from now on."""
    began_s = time.monotonic()
    return lambda: time.monotonic() - began_s
