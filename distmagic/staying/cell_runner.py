"""Runs cells on the ranks of one session, and notes what each cell leaves on them."""

from __future__ import annotations

import base64
import contextvars
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from distmagic.errors import (
    RunError,
    TimedOut,
    UsageError,
)
from distmagic.outcome.detached import Detached
from distmagic.outcome.run import LogParts, Run, left
from distmagic.payload.blobs import LocalBlob
from distmagic.payload.pack import dumped
from distmagic.remote.values.call import Cell, ModuleText
from distmagic.remote.values.seen import Seen
from distmagic.remote.wire import protocol
from distmagic.remote.wire.cells import MOST_TEXT
from distmagic.remote.wire.clipping import clipped, ranges
from distmagic.render.quantities import duration, moment
from distmagic.render.screen import Screen, UserRequest
from distmagic.request.flags import Request
from distmagic.runner import interrupts
from distmagic.runner.delivery import Delivery
from distmagic.session.background import BackgroundRun
from distmagic.session.local_hints import error_of
from distmagic.session.session import Session
from distmagic.state.events import Event
from distmagic.state.model import RunState
from distmagic.staying import cell_state, out_of_step, stopping
from distmagic.staying.cell_state import CellState
from distmagic.staying.control import Control
from distmagic.staying.following import form_for
from distmagic.staying.idle import IdleTime

# size limit of a cell that is sent inside its request; a longer one is sent before, as a file
_INLINE_BYTES = 60_000
BEAT_S = 0.1


class CellRunner:
    """Runs the cells of one session, one after the other.

    `state` is the session's state, and `idle` counts the ranks' time without a cell.
    """

    def __init__(
        self,
        request: Request,
        session: Session,
        hosts: tuple[str, ...],
        run: BackgroundRun,
        control: Control,
        modules_there: Mapping[str, ModuleText],
        idle: IdleTime,
    ) -> None:
        self.name = request.stay or ""
        self.request, self.hosts, self.idle = request, hosts, idle
        self.is_attached = False  # whether another kernel has started them
        self._session, self._run, self._control = session, run, control
        self._texts: dict[int, str] = {}  # of this kernel's cells
        self._modules = dict(modules_there)  # by name
        self._sent: dict[int, Mapping[str, str]] = {}  # digests by name
        self._logged: dict[int, tuple[int, ...]] = {}  # at the end of the last cell
        # Of the last cell: by it, a kernel finds the cell of an output.
        self._context = contextvars.copy_context()

    @property
    def label(self) -> str:
        """The ranks in a message: "ranks", with their name where a user has given one."""
        return "ranks" if self.name == "ranks" else f"ranks of {self.name}"

    @property
    def state(self) -> RunState:
        """The current state of the session."""
        return self._run.state

    @property
    def job(self) -> str:
        """The name of the session's job."""
        return self._run.job

    @property
    def since(self) -> str:
        """The time of day at which the ranks were started."""
        return moment(self.state.began_unix_s, time.time())

    @property
    def done(self) -> bool:
        """Whether the session is over."""
        return self._run.done

    @property
    def theirs(self) -> frozenset[str]:
        """The names that cells have assigned, on any rank."""
        return frozenset().union(*self._control.past.names.values())

    def raise_end(self) -> None:
        """Wait for the session's end, and raise its error."""
        try:
            after = self._run.wait()
        except RunError as error:
            cause = error
            if self.idle.is_up or isinstance(error, TimedOut):
                limit = duration(self.idle.limit_s)
                cause = TimedOut(
                    f"The {self.label} have ended: no cell ran on them for {limit} (--stay-idle, --idle)."
                )
            raise self._with_lost(cause) from None
        if isinstance(after, Detached):
            raise UsageError(
                f"This kernel has lost the hosts of the {self.label}; the ranks may still run on them.",
                f"%distributed attach {self.job} {self.name}",
            )
        raise RunError("The ranks have ended.", self._lost)

    def _with_lost(self, error: RunError) -> RunError:
        """Add the lost names to an error's hint, only once, and return it."""
        if self._lost not in error.hint:
            error.hint = f"{error.hint}\n{self._lost}".strip()
        return error

    @property
    def _lost(self) -> str:
        names = ", ".join(sorted(self.theirs)) or "nothing"
        return f"Lost with the {self.label}: {names}. The next %%ranks starts new ones."

    def end(self) -> None:
        """End every rank on every host, and wait until they have ended."""
        self._run.stop()

    def _targets(self, wanted: Sequence[int]) -> tuple[int, ...]:
        there = sorted(self.state.workers)
        missing = [rank for rank in wanted if rank not in there]
        if missing:
            raise UsageError(
                f"There is no rank {missing[0]} among the {self.label}.",
                f"They are {','.join(ranges(there))}.",
            )
        return tuple(wanted or there)

    def _run_unseen(
        self,
        cell: Cell,
        ranks: tuple[int, ...],
        noted: interrupts.Interrupts | None,
        screen: Screen | None = None,
    ) -> Run:
        """Run an internal cell, and show it on no screen or on this one."""
        source = form_for(self._control.pythons)
        packed = dumped(cell, Seen(), None, source, in_one=True)
        ended = self._run_parcel(packed, ranks, screen or Screen(), noted)
        return self._left(ended)

    def _run_parcel(  # all that a cell is made of
        self, local: LocalBlob, ranks: tuple[int, ...], screen: Screen, noted: interrupts.Interrupts | None,
        variable: str = "", notices: Sequence[str] = (), *, text: str = "",
    ) -> CellState:  # fmt: skip
        """Run a cell to its end.

        Only a user's cell, with its `text`, may make ranks create their process groups again.
        """
        is_cell = bool(text)
        if self.done or self.state.first_failure is not None or self.state.stopping:
            self.raise_end()
        is_of_all = len(ranks) == len(self.state.workers)
        is_stale = bool(out_of_step.notice(self._control.past.ends))
        anew = is_cell and is_of_all and is_stale
        message = self._message(local, ranks, text, anew=anew)
        began_unix_s = time.time()
        cell = cell_state.begin_cell(self.state, message.cell, ranks, began_unix_s)
        said = tuple(text for text in notices if text)
        terms = replace(self.state.terms, call=cell_state.title(text) or self.state.terms.call)  # fmt: skip
        run = replace(cell.run, variable=variable or self.name, notices=said, terms=terms)  # fmt: skip
        cell = replace(cell, run=run)
        self._control.begin(message)
        return self._finished(cell, screen, noted, is_cell=is_cell)

    def _finished(
        self,
        cell: CellState,
        screen: Screen,
        noted: interrupts.Interrupts | None,
        *,
        is_cell: bool,
    ) -> CellState:
        """Follow a cell to its end, and return its last state."""
        try:
            cell = self._follow(cell, screen, noted)
        finally:
            self._control.end()
        if cell.ends_ranks:
            self.end()
        if is_cell:
            cell = self._with_last_notices(cell)
        screen.finish(cell.run)
        return cell

    def _with_last_notices(self, cell: CellState) -> CellState:
        """Return a finished cell with notices: how it stopped, and whether process groups will be
        made again.
        """
        stale = out_of_step.notice(self._control.past.ends)
        of_stop = stopping.stopped_after(cell), stopping.raised_after(cell)
        new = [text for text in (*of_stop, stale) if text]
        run = replace(cell.run, notices=(*cell.run.notices, *new))
        return replace(cell, run=run)

    def _message(
        self, local: LocalBlob, ranks: tuple[int, ...], text: str, *, anew: bool
    ) -> protocol.RunCell:
        """Return the request for a cell; a long cell is sent to the hosts first.

        `anew`: make process groups again.
        """
        number = self._control.last + 1
        self._texts[number] = text
        request = protocol.RunCell(
            cell=number, ranks=ranks, text=clipped(text, MOST_TEXT), anew=anew,
            kernel=self._control.kernel,
        )  # fmt: skip
        if local.blob.size_bytes <= _INLINE_BYTES:
            data = base64.b64encode(local.path.read_bytes()).decode()
            return replace(request, data=data)
        nodes = dict.fromkeys(self.state.workers[rank].node_rank for rank in ranks)
        with ExitStack() as opened:
            links = [
                opened.enter_context(closing(self._run.open_link(node)))
                for node in nodes
            ]
            addresses = [self.state.nodes[node].address for node in nodes]
            # Large data is sent from this machine once, and then from host to host.
            Delivery(links, addresses, (local,), lambda *_: None, lambda *_: None).run()
            for link in links:
                link.finish()
        return replace(request, blob=local.blob.sha256)

    def _follow(
        self, cell: CellState, screen: Screen, noted: interrupts.Interrupts | None
    ) -> CellState:
        """Follow a cell to its end. If `noted` is None, an interrupt raises KeyboardInterrupt."""
        # Not at once: that would delay the cell's start.
        next_shown_s = time.monotonic() + BEAT_S
        while not cell.run.is_over:
            events = self._control.heard(BEAT_S)
            cell = self._after(cell, events, screen)
            for request in _requests(screen, noted):
                if request == "stop":
                    cell = stopping.next_stage(cell)
                    if cell.stage == "end":
                        self._run.ask_to_stop()
                elif request != "detach":
                    self._run.screen.ask(request)
            cell, due = stopping.due(cell)
            for ask in due:
                self._control.ask(ask)
            if stopping.is_stuck(cell):
                self._run.screen.ask("stacks")  # the view shows where they are
                cell = replace(cell, until_s=math.inf)
            if time.monotonic() >= next_shown_s and not cell.run.is_over:
                next_shown_s = time.monotonic() + BEAT_S
                screen.show(cell.run)
        return cell

    def _after(
        self, cell: CellState, events: Sequence[Event], screen: Screen
    ) -> CellState:
        """Return a cell's state after these events.

        Ranks that do run it are interrupted then. Raises `UsageError` if ranks run another kernel's
        in its place.
        """
        number = cell.run.cell
        if self._control.is_refused:
            self._texts.pop(number, None)
            own = (number, self._control.kernel)
            running = self._control.past.running.items()
            ranks = [rank for rank, one in running if (one.cell, one.kernel) == own]
            if ranks:
                stop = protocol.InterruptCell(cell=number, ranks=tuple(ranks))
                self._control.ask(stop)
            screen.finish(cell.run)
            raise self._taken()
        cell = cell_state.take(cell, events)
        if not events and self._run.done and not cell.run.is_over:
            self.raise_end()  # a bug has ended the loop
        return cell

    def _taken(self) -> UsageError:
        return UsageError(
            f"Another kernel has attached to the {self.label}, and runs their cells now.",
            f"%distributed attach {self.name} takes them back.",
        )

    def _left(self, cell: CellState) -> Run:
        """Return a finished cell as a `Run`.

        If it failed, raises its error instead, which carries the `Run`.
        """
        values = cell_state.values(cell.ends)
        logged = {}
        for rank in cell.run.workers:
            end = cell.ends.get(rank)
            begins, ends = self._logged.get(rank, ()), end.logged if end else ()
            logged[rank] = LogParts(begins=begins, ends=ends)
            self._logged[rank] = ends
        for line in cell_state.shown(cell.ends):
            print(line)  # noqa: T201  # what the cell shows
        # Not in a variable: this frame and the error's traceback would refer to each other.
        return left(cell.run, values, self._run.open_link, self._error(cell), logged)

    def _error(self, cell: CellState) -> RunError | None:
        """Return the error of a finished cell; None if it succeeded."""
        error = error_of(cell.run, was_interrupted=False)
        if error is None or not self.done:
            return error
        if cell.run.first_failure is None and not cell.stage:
            # The rank that ended the session may have died before the cell.
            error = error_of(self.state, was_interrupted=False) or error
        return self._with_lost(error)


def _requests(screen: Screen, noted: interrupts.Interrupts | None) -> list[UserRequest]:
    """Return the user's requests: from buttons on the screen, and by interrupts."""
    asked: list[UserRequest] = []
    if noted is not None:
        noted.ask(lambda _: asked.extend(screen.requests()))
        while noted.take():
            asked.append("stop")
    return asked
