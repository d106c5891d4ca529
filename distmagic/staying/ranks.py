"""`Ranks`: starts ranks that stay alive between cells, runs cells on them, and ends them."""

from __future__ import annotations

import base64
import contextvars
import keyword
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from distmagic.errors import (
    Cancelled,
    PayloadError,
    RunError,
    TimedOut,
    UsageError,
)
from distmagic.outcome.detached import Detached
from distmagic.outcome.run import LogParts, Run, left
from distmagic.payload import local_modules
from distmagic.payload.blobs import LocalBlob
from distmagic.payload.pack import dumped
from distmagic.remote.values import parcel
from distmagic.remote.values.call import Cell
from distmagic.remote.values.pickling import Seen
from distmagic.remote.wire import protocol
from distmagic.remote.wire.cells import MOST_TEXT
from distmagic.remote.wire.clipping import clipped, ranges
from distmagic.render.quantities import duration, plural
from distmagic.render.screen import Screen, UserRequest
from distmagic.request.cell import CellPlan
from distmagic.request.flags import Request
from distmagic.runner import interrupts
from distmagic.runner.delivery import Delivery
from distmagic.screens.log import NoScreen
from distmagic.session.background import BackgroundRun
from distmagic.session.local_hints import error_of
from distmagic.session.session import Session
from distmagic.state.model import RunState
from distmagic.staying import cell_state, holdings, modules, out_of_step, stopping
from distmagic.staying.cell_state import CellState
from distmagic.staying.control import Control
from distmagic.staying.following import form_for, prepared
from distmagic.staying.idle import IdleTime

_INLINE_BYTES = 60_000  # size limit of a cell that is sent inside its request; a longer one is sent before, as a file
_BEAT_S = 0.1
_INVENTORY = (
    '__import__("distmagic.remote.training.inventory", fromlist="x").of('
    "globals(), {names!r})"
)
_POST_MORTEM = '__import__("distmagic.remote.rank.stay", fromlist="x").post_mortem()'


@dataclass(frozen=True, kw_only=True)
class CellRequest:
    """A cell to run on ranks that stay. `notebook` has the notebook's names; `ranks` () means all."""

    plan: CellPlan
    notebook: Mapping[str, object]
    labels: Mapping[str, str]
    ranks: tuple[int, ...] = ()
    variable: str = "run"


class Ranks:
    """Ranks that stay alive between cells. `state` is their session's state, and `idle` counts their time without a
    cell.
    """

    def __init__(
        self,
        request: Request,
        session: Session,
        hosts: tuple[str, ...],
        run: BackgroundRun,
        control: Control,
        modules_there: Mapping[str, str],
        idle: IdleTime,
    ) -> None:
        self.name = request.stay or ""
        self.request, self.hosts, self.idle = request, hosts, idle
        self.is_attached = False  # whether another kernel has started them
        self._session, self._run, self._control = session, run, control
        self._cells = 0
        self._texts: dict[int, str] = {}  # of this kernel's cells
        self._modules = dict(modules_there)  # digests by module name
        self._theirs: dict[int, frozenset[str]] = {}
        self._sent: dict[int, Mapping[str, str]] = {}  # digests by name
        self._last_ends: dict[int, protocol.CellEnded] = {}
        self._logged: dict[int, tuple[int, ...]] = {}  # at the end of the last cell
        self._is_out_of_step = False
        # Of the last cell: by it, a kernel finds the cell of an output.
        self._context = contextvars.copy_context()

    @property
    def state(self) -> RunState:
        """The current state of the session."""
        return self._run.state

    @property
    def job(self) -> str:
        """The name of the session's job."""
        return self._run.job

    @property
    def done(self) -> bool:
        """Whether the session is over."""
        return self._run.done

    @property
    def history(self) -> list[str]:
        """The texts of the cells so far. Of a former kernel's, the middle of a very long one is left out."""
        texts = {**self._control.past.texts}
        texts.update(
            (cell, text) for cell, text in self._texts.items() if cell in texts
        )
        return [texts[cell] for cell in sorted(texts)]

    @property
    def is_kept(self) -> bool:
        """Whether the ranks outlive this kernel."""
        return self._control.ends_idle_s is not None

    @property
    def theirs(self) -> frozenset[str]:
        """The names that cells have assigned, on any rank."""
        return frozenset().union(*self._theirs.values())

    def raise_end(self) -> None:
        """Wait for the session's end, and raise its error."""
        try:
            after = self._run.wait()
        except RunError as error:
            cause = error
            if self.idle.is_up or isinstance(error, TimedOut):
                limit = duration(self.idle.limit_s)
                cause = TimedOut(
                    f"The ranks of {self.name} have ended: no cell ran on them for {limit} (--stay-idle, --idle)."
                )
            raise self._with_lost(cause) from None
        if isinstance(after, Detached):
            raise UsageError(
                f"This kernel has lost the hosts of {self.name}; the ranks may stay there without it.",
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
        return f"Lost with the ranks of {self.name}: {names}. The next %%ranks starts new ones."

    def logs(
        self, rank: int, stream: str | None = None, *, by_time: bool = False
    ) -> str:
        """Return a rank's output in all its cells so far, as `Run.logs` does."""
        return self._run.logs(rank, stream, by_time=by_time)

    def end(self) -> None:
        """End every rank on every host, and wait until they have ended."""
        self._run.stop()

    def __repr__(self) -> str:
        state = self.state
        where = ", ".join(self.hosts)
        return f"<ranks {self.name}: {len(state.workers)} on {where}, {state.phase}, {plural(len(self.history), 'cell')}>"

    # ---- values

    def __getitem__(self, which: str | int) -> Any:
        """`ranks["loss"]` returns a name's values on all ranks, in rank order; `ranks[2]` gives access to one rank."""
        if isinstance(which, str):
            return self.values(which, self._targets(()))
        return OneRank(self, self._targets((which,)))

    def __setitem__(self, name: str, value: object) -> None:
        """Assign a name on all ranks."""
        self.set_value(name, value, self._targets(()))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names that cells have assigned, on any rank."""
        return iter(sorted(self.theirs))

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def values(self, name: str, ranks: tuple[int, ...]) -> list[Any]:
        """Return the values of a name on some ranks. Raises the error of a cell that consists of the name, or
        `NoResult`.
        """
        shown = f"{self.name}[{name!r}]"
        cell = Cell(_name(name), shown, texts={shown: name}, keeps=True)
        run = self._run_quietly(cell, ranks)
        for rank in ranks:
            ended = run.state.workers[rank].ended
            if ended is not None and rank in run.results and ended.meaning:
                print(f"rank {rank}: {ended.meaning}")  # noqa: T201
        return [run.results[rank] for rank in ranks]

    def set_value(self, name: str, value: object, ranks: tuple[int, ...]) -> None:
        """Assign a name on some ranks. Raises `PayloadError` for a value that can't be sent."""
        shown = f"{self.name}[{name!r}] = ..."
        named = {_name(name): value}
        self._run_quietly(Cell("", shown, names=named, is_given=True), ranks)

    def _run_quietly(self, cell: Cell, ranks: tuple[int, ...]) -> Run:
        """Run an internal cell. An interrupt also ends it on the ranks."""
        with self._at_work():
            try:
                return self._run_unseen(cell, ranks, None)
            except parcel.Unpicklable as error:
                raise PayloadError(error.message, error.hint) from error
            except KeyboardInterrupt:
                left = protocol.InterruptCell(cell=self._cells, ranks=ranks)
                self._control.ask(left)
                raise

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
        ended = self._run_parcel(packed, ranks, screen or NoScreen(), noted)
        return self._left(ended, is_cell=False)

    def holdings(self) -> list[str]:
        """Return what the ranks have under the names that cells have assigned, and their GPU memory, as lines of text.

        If another kernel has the ranks, the only line says so: it numbers their cells.
        """
        if self._control.is_taken:
            return [f"another kernel has them; %distributed attach {self.name} takes them back"]  # fmt: skip
        name = f"{self.name}: names"
        code = _INVENTORY.format(names=sorted(self.theirs))
        cell = Cell(code, name, texts={name: code}, keeps=True)
        run = self._run_unseen(cell, self._targets(()), None)
        if self.is_kept:
            self.idle.end_cell()  # their hosts count from this cell on, too
        return holdings.lines(dict(run.results.items()))

    def debug(self, rank: int | None, screen: Screen) -> None:
        """Open pdb where the last cell failed on a rank: on this one, or on the first that raised. Raises `UsageError`."""
        outcomes = {one: end.ended.outcome for one, end in self._last_ends.items()}
        raised = [one for one, outcome in outcomes.items() if outcome == "raised"]
        chosen = min(raised, default=None) if rank is None else rank
        if chosen is None or outcomes.get(chosen, "returned") == "returned":
            where = "No rank has" if chosen is None else f"Rank {chosen} has not"
            raise UsageError(
                f"{where} failed in the last cell of {self.name}.",
                f"Ranks that have: {','.join(ranges(raised)) or 'none'}.",
            )
        name = f"{self.name}: debug"
        cell = Cell(_POST_MORTEM, name, texts={name: _POST_MORTEM})
        with self._at_work(), interrupts.noted() as noted:
            self._run_unseen(cell, (chosen,), noted, screen)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Count no idle time in the block. Raises the session's error if it was idle too long before."""
        if self._control.is_taken and not self.done:
            raise UsageError(
                f"Another kernel has attached to the ranks of {self.name}, and runs their cells now.",
                f"%distributed attach {self.name} takes them back.",
            )
        if not self.idle.begin_cell():
            self.raise_end()
        try:
            yield
        finally:
            self._context = contextvars.copy_context()
            self.idle.end_cell()

    def show_idle_notice(self) -> None:
        """Print, under the last cell that used the ranks, when they end. Called between two cells, on the thread of the
        session's loop.
        """
        if not self._control.is_taken:
            self._context.run(print, self.idle_notice(), flush=True)

    def idle_notice(self) -> str:
        """Return when the ranks end without a cell, and the command that keeps them."""
        where = f"{len(self.state.workers)} on {', '.join(self.hosts)}"
        left = duration(round(self.idle.left_s))
        return (
            f"The ranks of {self.name} ({where}) end in {left}, because no cell runs on them. "
            f"%distributed stay {self.name} keeps them."
        )

    def keep(self) -> None:
        """Begin the idle time anew, as any cell does. Raises the session's error if it was idle too long before."""
        self._run_quietly(Cell("", "nothing"), self._targets(()))

    def take_over(self) -> None:
        """Make the ranks this kernel's, with the names, process groups and texts of all their cells so far.

        Waits for the end of a cell that still runs. An interrupt ends only the waiting.
        """
        while not self._are_there:
            if self.done:
                self.raise_end()
            with self._run.screen.has_changed:
                self._run.screen.has_changed.wait(_BEAT_S)
        # The answers of ranks come after all earlier events of their nodes.
        self._run.stacks()
        past = self._control.take_over()
        self._cells = past.last
        self._theirs = dict(past.names)
        self._last_ends = dict(past.ends)
        self._is_out_of_step = bool(out_of_step.notice(self._last_ends))
        self._sent.clear()
        if past.running:
            ranks = ",".join(ranges(sorted(past.running)))
            wait = "still run a cell; this cell waits for its end"
            print(f"Ranks {ranks} of {self.name} {wait}.")  # noqa: T201
        self.keep()

    # ---- one cell

    def run_cell(self, request: CellRequest, screen: Screen) -> Run:
        """Run a cell on its ranks, and show it. Raises the cell's error, or the error that ended the session."""
        with self._at_work(), interrupts.noted() as noted:
            self._wait_for_ranks(screen, noted)
            ranks = self._targets(request.ranks)
            packed = prepared(
                request.plan, request.notebook, self._theirs_on(ranks), self._there(ranks), request.labels,
                self._control.pythons, self.theirs,
            )  # fmt: skip
            notices = [packed.notice, self._bring(packed.modules, noted)]
            cell = self._run_parcel(
                packed.parcel, ranks, screen, noted, request.variable, notices, text=request.plan.text,
            )  # fmt: skip
            for rank, end in cell.ends.items():
                failure = end.ended.failure
                # Otherwise the rank could not load the cell, and has none of the values.
                if failure is None or failure.type != parcel.ParcelError.__name__:
                    self._sent[rank] = packed.digests
        return self._left(cell)

    def _bring(self, names: Iterable[str], noted: interrupts.Interrupts) -> str:
        """Send changed local modules to all ranks and reload them there; return a notice about it."""
        found = modules.texts_of(local_modules.found({*names, *self._modules}))
        stale = modules.stale(found, self._modules)
        if not stale:
            return ""
        cell = Cell("", "modules", modules=stale)
        self._run_unseen(cell, self._targets(()), noted)
        names = [module.name for module in stale]
        notice = f"Modules as they are on disk now: {', '.join(names)}."
        if not self._modules.keys().isdisjoint(names):
            notice += " Objects that were made before keep their old class."
        for module in stale:
            self._modules[module.name] = modules.digest(module)
        return notice

    def _run_parcel(  # all that a cell is made of
        self, local: LocalBlob, ranks: tuple[int, ...], screen: Screen, noted: interrupts.Interrupts | None,
        variable: str = "", notices: Sequence[str] = (), *, text: str = "",
    ) -> CellState:  # fmt: skip
        """Run a cell to its end. Only a user's cell, with its `text`, may make ranks create their process groups again."""
        is_cell = bool(text)
        if self.done or self.state.first_failure is not None or self.state.stopping:
            self.raise_end()
        is_of_all = len(ranks) == len(self.state.workers)
        anew = is_cell and self._is_out_of_step and is_of_all
        message = self._message(local, ranks, text, anew=anew)
        began_unix_s = time.time()
        cell = cell_state.begin_cell(self.state, message.cell, ranks, began_unix_s)
        said = tuple(text for text in notices if text)
        cell = replace(
            cell, run=replace(cell.run, variable=variable or self.name, notices=said)
        )
        self._control.begin(message)
        try:
            cell = self._follow(cell, screen, noted)
        finally:
            self._control.end()
        if cell.ends_ranks:
            self.end()
        for rank, end in cell.ends.items():
            self._theirs[rank] = frozenset(end.names)
        if is_cell:
            cell = self._with_last_notices(cell)
        screen.finish(cell.run)
        return cell

    def _with_last_notices(self, cell: CellState) -> CellState:
        """Return a finished cell with notices: how it stopped, and whether process groups will be made again."""
        self._last_ends.update(cell.ends)
        stale = out_of_step.notice(self._last_ends)
        self._is_out_of_step = bool(stale)
        of_stop = stopping.stopped_after(cell), stopping.raised_after(cell)
        new = [text for text in (*of_stop, stale) if text]
        run = replace(cell.run, notices=(*cell.run.notices, *new))
        return replace(cell, run=run)

    def _wait_for_ranks(self, screen: Screen, noted: interrupts.Interrupts) -> None:
        """Wait until all ranks are running, and show the progress of their start."""
        while not self._are_there:
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

    @property
    def _are_there(self) -> bool:
        """Whether all ranks are running."""
        state = self.state
        has_all = len(state.workers) == state.world_size > 0
        return state.phase == "running" and has_all

    def _targets(self, wanted: Sequence[int]) -> tuple[int, ...]:
        there = sorted(self.state.workers)
        missing = [rank for rank in wanted if rank not in there]
        if missing:
            raise UsageError(
                f"There is no rank {missing[0]} among the ranks of {self.name}.",
                f"They are {','.join(ranges(there))}.",
            )
        return tuple(wanted or there)

    def _theirs_on(self, ranks: Sequence[int]) -> frozenset[str]:
        """Return the names that cells have assigned on all these ranks."""
        nothing = frozenset[str]()
        return frozenset.intersection(
            *(self._theirs.get(rank, nothing) for rank in ranks)
        )

    def _there(self, ranks: Sequence[int]) -> Mapping[str, str]:
        """Return the digests of the notebook's values that were sent to any of these ranks, "" if not all have one value.

        A rank that has assigned the name itself does not count: it keeps its own value.
        """
        found = {}
        for name in set[str]().union(*(self._sent.get(rank, ()) for rank in ranks)):
            digests = {
                self._sent.get(rank, {}).get(name, "")
                for rank in ranks
                if name not in self._theirs.get(rank, ())
            }
            found[name] = digests.pop() if len(digests) == 1 else ""
        return found

    def _message(
        self, local: LocalBlob, ranks: tuple[int, ...], text: str, *, anew: bool
    ) -> protocol.RunCell:
        """Return the request for a cell; a long cell is sent to the hosts first. `anew`: make process groups again."""
        self._cells += 1
        self._texts[self._cells] = text
        request = protocol.RunCell(
            cell=self._cells, ranks=ranks, text=clipped(text, MOST_TEXT), anew=anew
        )
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
        next_shown_s = 0.0
        while not cell.run.is_over:
            events = self._control.heard(_BEAT_S)
            cell = cell_state.take(cell, events)
            if not events and self._run.done and not cell.run.is_over:
                self.raise_end()  # a bug has ended the loop
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
            if time.monotonic() >= next_shown_s and not cell.run.is_over:
                next_shown_s = time.monotonic() + _BEAT_S
                screen.show(cell.run)
        return cell

    def _left(self, cell: CellState, *, is_cell: bool = True) -> Run:
        """Return a finished cell as a `Run`. If it failed, raises its error instead, which carries the `Run`."""
        state = cell.run
        if is_cell:
            self._session.history.add(state)
        values = {
            rank: base64.b64decode(end.value)
            for rank, end in cell.ends.items()
            if end.value
        }
        logged = {}
        for rank in state.workers:
            end = cell.ends.get(rank)
            begins, ends = self._logged.get(rank, ()), end.logged if end else ()
            logged[rank] = LogParts(begins=begins, ends=ends)
            self._logged[rank] = ends
        for line in cell_state.shown(cell.ends):
            print(line)  # noqa: T201  # what the cell shows
        # Not in a variable: this frame and the error's traceback would refer to each other.
        return left(state, values, self._run.open_link, self._error(cell), logged)

    def _error(self, cell: CellState) -> RunError | None:
        """Return the error of a finished cell; None if it succeeded."""
        error = error_of(cell.run, was_interrupted=False)
        if error is None or not self.done:
            return error
        if cell.run.first_failure is None and not cell.stage:
            # The rank that ended the session may have died before the cell.
            error = error_of(self.state, was_interrupted=False) or error
        return self._with_lost(error)


@dataclass(frozen=True)
class OneRank:
    """One of the ranks that stay: `ranks[2]["loss"]`."""

    all: Ranks
    ranks: tuple[int, ...]

    def __getitem__(self, name: str) -> Any:
        """Return the value of a name on the rank."""
        return self.all.values(name, self.ranks)[0]

    def __setitem__(self, name: str, value: object) -> None:
        """Assign a name on this rank."""
        self.all.set_value(name, value, self.ranks)


def _requests(screen: Screen, noted: interrupts.Interrupts | None) -> list[UserRequest]:
    """Return the user's requests: from buttons on the screen, and by interrupts."""
    asked: list[UserRequest] = []
    if noted is not None:
        noted.ask(lambda _: asked.extend(screen.requests()))
        while noted.take():
            asked.append("stop")
    return asked


def _name(name: str) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"{name!r} is not a variable's name.", 'Write ranks["loss"].')
    return name
