"""`Ranks`: ranks that stay, as one notebook has them. It starts them, runs cells on them, and ends them."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from distmagic.connection.link import Link
from distmagic.connection.requests import blob_requests
from distmagic.errors import Cancelled, RunError, SpecError, WorkerFailed
from distmagic.outcome.run import Run
from distmagic.payload import local_modules, on_ranks
from distmagic.payload.pack import Payload, dumped, write_code
from distmagic.remote.values.call import Stay
from distmagic.remote.values.pickling import Seen
from distmagic.remote.wire import protocol
from distmagic.remote.wire.clipping import ranges
from distmagic.render.screen import Screen, UserRequest
from distmagic.request.cell import CellPlan
from distmagic.request.flags import Request
from distmagic.runner import interrupts
from distmagic.screens.log import NoScreen
from distmagic.session.background import BackgroundRun
from distmagic.session.local_hints import error_of
from distmagic.session.place import Place
from distmagic.session.session import Session
from distmagic.state.model import RunState
from distmagic.staying import cell_state, out_of_step, stopping
from distmagic.staying.cell_state import CellState
from distmagic.staying.control import Control
from distmagic.staying.following import CellParcel, prepared

_INLINE_BYTES = 60_000  # of a cell that goes along with its request; a longer one goes before it, as a file
_BEAT_S = 0.1


@dataclass(frozen=True, kw_only=True)
class CellRequest:
    """A cell for ranks that stay. `notebook` are the notebook's own names, `ranks` () means all."""

    plan: CellPlan
    notebook: Mapping[str, object]
    labels: Mapping[str, str]
    ranks: tuple[int, ...] = ()
    variable: str = "run"


class _OfSession(NoScreen):
    """The screen of a session's own loop, which is seen by the cells alone."""

    def __init__(self, *, can_type: bool) -> None:
        self._can_type = can_type

    def can_type(self) -> bool:
        """Whether the user could type where the first cell is shown."""
        return self._can_type


class Ranks:
    """Ranks that stay: `state` is all that is known of their session, `history` the texts of their cells."""

    def __init__(
        self,
        request: Request,
        session: Session,
        hosts: tuple[str, ...],
        run: BackgroundRun,
        control: Control,
    ) -> None:
        self.name = request.stay or ""
        self.request, self.hosts = request, hosts
        self.history: list[str] = []
        self._session, self._run, self._control = session, run, control
        self._cells = 0
        self._theirs: dict[int, frozenset[str]] = {}
        self._sent: dict[int, dict[str, str]] = {}
        self._last_ends: dict[int, protocol.CellEnded] = {}
        self._is_out_of_step = False

    @property
    def state(self) -> RunState:
        """All that is known of the session now."""
        return self._run.state

    @property
    def job(self) -> str:
        """The name of the job that the session is."""
        return self._run.job

    @property
    def done(self) -> bool:
        """Whether the session is over."""
        return self._run.done

    @property
    def is_over(self) -> bool:
        """Whether nothing of the session is left, or is about to."""
        return self.done or self.state.is_over or bool(self.state.stopping)

    @property
    def theirs(self) -> frozenset[str]:
        """The names that cells have given values to, on any rank."""
        return frozenset().union(*self._theirs.values())

    def raise_end(self) -> None:
        """Raise why the session is over."""
        try:
            self._run.wait()
        except RunError as error:
            error.hint = f"{error.hint}\n{self._lost}".strip()
            raise
        raise RunError("The ranks have ended.", self._lost)

    @property
    def _lost(self) -> str:
        names = ", ".join(sorted(self.theirs)) or "nothing"
        return f"Lost with the ranks of {self.name}: {names}. The next %%ranks starts new ones."

    def end(self) -> None:
        """End every rank on every host; returns when that is so."""
        self._run.stop()

    def __repr__(self) -> str:
        state = self.state
        where = ", ".join(self.hosts)
        return f"<ranks {self.name}: {len(state.workers)} on {where}, {state.phase}, {len(self.history)} cells>"

    # ---- one cell

    def run_cell(self, request: CellRequest, screen: Screen) -> Run:
        """Run a cell on its ranks, and show it. Raises how it failed, and why the session has ended."""
        with interrupts.noted() as noted:
            self._wait_for_ranks(screen, noted)
            ranks = self._targets(request.ranks)
            packed = prepared(
                request.plan, request.notebook, self.theirs, self._there(ranks), request.labels
            )  # fmt: skip
            message = self._message(packed, ranks)
            cell = cell_state.begin_cell(
                self.state, message.cell, ranks, began_unix_s=time.time()
            )
            notices = (packed.notice,) if packed.notice else ()
            run = replace(cell.run, variable=request.variable, notices=notices)
            cell = replace(cell, run=run)
            self.history.append(request.plan.text)
            self._control.begin(message)
            try:
                cell = self._follow(cell, screen, noted)
            finally:
                self._control.end()
            for rank in ranks:
                self._sent.setdefault(rank, {}).update(packed.digests)
            for rank, end in cell.ends.items():
                self._theirs[rank] = frozenset(end.names)
            cell = self._with_last_notices(cell)
            screen.finish(cell.run)
        return self._left(cell)

    def _with_last_notices(self, cell: CellState) -> CellState:
        """Return a cell that is over, with where it has stopped, and whether groups are to be made anew."""
        self._last_ends.update(cell.ends)
        stale = out_of_step.notice(self._last_ends)
        self._is_out_of_step = bool(stale)
        new = [text for text in (stopping.stopped_after(cell), stale) if text]
        run = replace(cell.run, notices=(*cell.run.notices, *new))
        return replace(cell, run=run)

    def _wait_for_ranks(self, screen: Screen, noted: interrupts.Interrupts) -> None:
        """Return when all ranks are there; show meanwhile how far they are."""
        while not _has_begun(self.state):
            if self._run.done:
                screen.finish(self.state)
                self._run.wait()
            screen.show(self.state)
            with self._run.screen.has_changed:
                self._run.screen.has_changed.wait(_BEAT_S)
            if noted.take() or "stop" in screen.requests():
                self._run.stop()
                screen.finish(self.state)
                raise Cancelled("Interrupted; the ranks were ended.")

    def _targets(self, wanted: Sequence[int]) -> tuple[int, ...]:
        there = sorted(self.state.workers)
        missing = [rank for rank in wanted if rank not in there]
        if missing:
            raise SpecError(
                f"There is no rank {missing[0]} among the ranks of {self.name}.",
                f"They are {','.join(ranges(there))}.",
            )
        return tuple(wanted or there)

    def _there(self, ranks: Sequence[int]) -> Mapping[str, str]:
        """Return the digests of what all these ranks have from the notebook."""
        first, *others = (self._sent.get(rank, {}) for rank in ranks)
        return {
            name: digest
            for name, digest in first.items()
            if all(other.get(name) == digest for other in others)
        }

    def _message(self, packed: CellParcel, ranks: tuple[int, ...]) -> protocol.RunCell:
        """Return the request for a cell. A long one is brought to the hosts before."""
        self._cells += 1
        local = packed.parcel
        anew = self._is_out_of_step and len(ranks) == len(self.state.workers)
        if local.blob.size_bytes <= _INLINE_BYTES:
            data = base64.b64encode(local.path.read_bytes()).decode()
            return protocol.RunCell(cell=self._cells, ranks=ranks, data=data, anew=anew)
        nodes = dict.fromkeys(self.state.workers[rank].node_rank for rank in ranks)
        for node in nodes:
            link = self._open_link(node)
            with closing(link):
                blob_requests.deliver(link, (local,))
                link.finish()
        blob = local.blob.sha256
        return protocol.RunCell(cell=self._cells, ranks=ranks, blob=blob, anew=anew)

    def _open_link(self, node: int) -> Link:
        return self._run.open_link(node)

    def _follow(
        self, cell: CellState, screen: Screen, noted: interrupts.Interrupts
    ) -> CellState:
        """Follow a cell to its end."""
        next_shown_s = 0.0
        while not cell.run.is_over:
            events = self._control.heard(_BEAT_S)
            cell = cell_state.take(cell, events)
            if not events and self._run.done and not cell.run.is_over:
                self._run.wait()  # a bug has ended the loop
                raise RunError("The ranks have ended.")
            asked: list[UserRequest] = []
            noted.ask(lambda _, into=asked: into.extend(screen.requests()))  # type: ignore[misc]
            while noted.take():
                asked.append("stop")
            for request in asked:
                if request == "stop":
                    cell = stopping.next_stage(cell)
                    if cell.stage == "end":
                        self._run.ask_to_stop()
                elif request != "detach":
                    self._run.screen.ask(request)
            cell, due = stopping.due(cell)
            for ask in due:
                self._control.ask(ask)
            if time.monotonic() >= next_shown_s and not cell.run.is_over:
                next_shown_s = time.monotonic() + _BEAT_S
                screen.show(cell.run)
        return cell

    def _left(self, cell: CellState) -> Run:
        """Return what is left of a cell. Raises the error that its end means, which carries the `Run`."""
        state = cell.run
        self._session.history.add(state)
        values = {}
        for rank, end in cell.ends.items():
            if not end.value:
                continue
            with contextlib.suppress(ValueError):  # no host of ours sends such a value
                values[rank] = base64.b64decode(end.value, validate=True)
        error = error_of(state, was_interrupted=False)
        for line in cell_state.shown(cell.ends):
            print(line)  # noqa: T201  # what the cell shows
        run = Run(state, values, self._run.open_link, shown=error is None)
        if error is None:
            return run
        if isinstance(error, WorkerFailed):
            error.hint = f"{out_of_step.outdated(cell.ends)}\n{error.hint}".strip()
        error.run = run
        try:
            raise error
        finally:
            del error


def _has_begun(state: RunState) -> bool:
    """Whether all ranks of a session are there."""
    count = len(state.workers)
    return state.phase == "running" and count == state.world_size > 0


def start(
    place: Place,
    session: Session,
    request: Request,
    plan: CellPlan,
    limit_bytes: int,
    *,
    can_type: bool,
) -> Ranks:
    """Begin to start ranks that stay at this place; their first cell is `plan`, whose modules come along."""
    control = Control()
    screen = _OfSession(can_type=can_type)
    name = request.stay or ""
    with place.given_up_after_error():
        payload = _payload(plan, name, limit_bytes)
        run = place.begin(payload, screen, name, control)
    return Ranks(request, session, place.names, run, control)


def _payload(plan: CellPlan, name: str, limit_bytes: int) -> Payload:
    """Return what ranks need to stay: the local modules that the first cell imports, and no call."""
    found = local_modules.found(local_modules.imports_of_text(plan.text))
    shown = on_ranks.look([(name, plan.text, None), *on_ranks.of_modules(found)])
    return Payload(
        call=dumped(Stay(), Seen(), None),
        code=write_code(found, {}, {}, shown),
        modules=found,
        title=f"%%ranks {name}",
        notice=shown.notice,
        limit_bytes=limit_bytes,
    )
