"""`Ranks`: the ranks that stay alive between cells, their values, and their next cell."""

from __future__ import annotations

import contextvars
import keyword
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from distmagic.errors import (
    Cancelled,
    PayloadError,
    UsageError,
)
from distmagic.outcome.run import Run
from distmagic.payload import local_modules
from distmagic.remote.frozen import frozen
from distmagic.remote.values import parcel
from distmagic.remote.values.call import Cell
from distmagic.remote.wire import protocol
from distmagic.remote.wire.clipping import ranges
from distmagic.render.quantities import duration, plural
from distmagic.render.screen import Screen
from distmagic.request.cells.cell import CellPlan
from distmagic.runner import interrupts
from distmagic.state.events import Event
from distmagic.staying import cell_state, holdings, modules
from distmagic.staying.cell_runner import BEAT_S, CellRunner
from distmagic.staying.following import prepared

_INVENTORY = (
    '__import__("distmagic.remote.training.inventory", fromlist="x").of('
    "globals(), {names!r})"
)
_POST_MORTEM = '__import__("distmagic.remote.rank.stay", fromlist="x").post_mortem()'


@frozen
class CellRequest:
    """A cell to run on ranks that stay.

    `notebook` has the notebook's names; `ranks` () means all.
    """

    plan: CellPlan
    notebook: Mapping[str, object]
    labels: Mapping[str, str]
    ranks: tuple[int, ...] = ()
    variable: str = "run"


class Ranks(CellRunner):
    """Ranks that stay alive between cells, for users and for the magics."""

    @property
    def history(self) -> list[str]:
        """The texts of the cells so far.

        Of a former kernel's, the middle of a very long one is left out.
        """
        texts = sorted(self._control.past.texts.items())
        return [self._texts.get(cell, text) for cell, text in texts]

    @property
    def program(self) -> list[str]:
        """The texts of the cells as parts of a program: one that has failed is a comment."""
        past = self._control.past
        return [
            indent(text, "# ", bool) if cell in past.failed else text
            for cell, text in zip(sorted(past.texts), self.history, strict=False)
        ]

    @property
    def is_kept(self) -> bool:
        """Whether the ranks outlive this kernel."""
        return self._control.ends_idle_s is not None

    def logs(
        self, rank: int, stream: str | None = None, *, by_time: bool = False
    ) -> str:
        """Return a rank's output in all its cells so far, as `Run.logs` does."""
        return self._run.logs(rank, stream, by_time=by_time)

    def __repr__(self) -> str:
        state = self.state
        where = ", ".join(self.hosts)
        return f"<ranks {self.name}: {len(state.workers)} on {where}, {state.phase}, {plural(len(self.history), 'cell')}>"

    # ---- values

    def __getitem__(self, which: str | int) -> Any:
        """`ranks["loss"]` returns a name's values on all ranks, in rank order; `ranks[2]` gives
        access to one rank.
        """
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
        """Return the values of a name on some ranks.

        Raises the error of a cell that consists of the name, or `NoResult`.
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
                left = protocol.InterruptCell(cell=self._control.last, ranks=ranks)
                self._control.ask(left)
                raise

    def holdings(self) -> list[str]:
        """Return what the ranks have under the names that cells have assigned, and their GPU
        memory, as lines of text.

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
        """Open pdb where the last cell failed on a rank: on this one, or on the first that raised.

        Raises `UsageError`.
        """
        ends = self._control.past.ends
        outcomes = {one: end.ended.outcome for one, end in ends.items()}
        raised = [one for one, outcome in outcomes.items() if outcome == "raised"]
        chosen = min(raised, default=None) if rank is None else rank
        if chosen is None or outcomes.get(chosen, "returned") == "returned":
            where = "No rank has" if chosen is None else f"Rank {chosen} has not"
            raise UsageError(
                f"{where} failed in the last cell of the {self.label}.",
                f"Ranks that have: {','.join(ranges(raised)) or 'none'}.",
            )
        name = f"{self.name}: debug"
        cell = Cell(_POST_MORTEM, name, texts={name: _POST_MORTEM})
        with self._at_work(), interrupts.noted() as noted:
            self._run_unseen(cell, (chosen,), noted, screen)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Count no idle time in the block.

        Raises the session's error if it was idle too long before.
        """
        if self._control.is_taken and not self.done:
            raise self._taken()
        if not self.idle.begin_cell():
            self.raise_end()
        try:
            yield
        finally:
            self._context = contextvars.copy_context()
            self.idle.end_cell()

    def show_idle_notice(self) -> None:
        """Print, under the last cell that used the ranks, when they end without a cell, and the
        command that keeps them.

        Called between two cells, on the thread of the session's loop.
        """
        where = f"{len(self.state.workers)} on {', '.join(self.hosts)}"
        left = duration(round(self.idle.left_s))
        notice = (
            f"The {self.label} ({where}) end in {left}, because no cell runs on them. "
            f"%distributed stay {self.name} keeps them."
        )
        if not self._control.is_taken:
            self._context.run(print, notice, flush=True)

    def keep(self) -> None:
        """Restart the idle time, as any cell does.

        Raises the session's error if it was idle too long before.
        """
        self._run_quietly(Cell("", "nothing"), self._targets(()))

    def take_over(self, screen: Screen) -> None:
        """Make the ranks this kernel's, with the names, process groups and texts of all their cells
        so far.

        A cell that still runs is shown to its end, and interrupts are for it.
        """
        while not self._are_there:
            if self.done:
                self.raise_end()
            with self._run.screen.has_changed:
                self._run.screen.has_changed.wait(BEAT_S)
        # The answers of ranks come after all earlier events of their nodes.
        self._run.stacks()
        past = self._control.take_over()
        self._sent.clear()
        if ranks := past.at_work:
            where = f"Of the {self.label}, {','.join(ranges(ranks))}"
            print(f"{where} still run a cell, which is shown to its end.")  # noqa: T201
            is_cell = past.running[ranks[0]].is_users
            # Ranks that ended the cell while no kernel was there to report it to the others.
            ends = [end for end in past.ends.values() if end.cell == past.last]
            all_ranks = sorted({*ranks, *(end.rank for end in ends)})
            cell = cell_state.begin_cell(self.state, past.last, all_ranks, time.time())
            before = [self._of_rank(end) for end in ends]
            cell = cell_state.take(cell, before)
            with self._at_work(), interrupts.noted() as noted:
                self._finished(cell, screen, noted, is_cell=is_cell)
        self.keep()

    def _of_rank(self, end: protocol.CellEnded) -> Event:
        node = self.state.workers[end.rank].node_rank
        return Event(node_rank=node, at_s=self.state.at_s, what=end)

    # ---- one cell

    def run_cell(self, request: CellRequest, screen: Screen) -> Run:
        """Run a cell on its ranks, and show it.

        Raises the cell's error, or the error that ended the session.
        """
        with self._at_work(), interrupts.noted() as noted:
            self._wait_for_ranks(screen, noted)
            ranks = self._targets(request.ranks)
            # The names that cells have assigned on all these ranks.
            names = self._control.past.names
            theirs = frozenset.intersection(
                *(names.get(rank, frozenset()) for rank in ranks)
            )
            packed = prepared(
                request.plan, request.notebook, theirs, self._there(ranks), request.labels,
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
        self._session.history.add(cell.run)
        return self._left(cell)

    def _bring(self, names: Iterable[str], noted: interrupts.Interrupts) -> str:
        """Send changed local modules to all ranks and reload them on the ranks; return a notice
        about it.
        """
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
            self._modules[module.name] = module
        return notice

    def _wait_for_ranks(self, screen: Screen, noted: interrupts.Interrupts) -> None:
        """Wait until all ranks are running, and show the progress of their start."""
        while not self._are_there:
            if self._run.done:
                screen.finish(self.state)
                self._run.wait()
            screen.show(self.state)
            with self._run.screen.has_changed:
                self._run.screen.has_changed.wait(BEAT_S)
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

    def _there(self, ranks: Sequence[int]) -> Mapping[str, str]:
        """Return the digests of the notebook's values that were sent to any of these ranks, "" if
        not all have one value.

        A rank that has assigned the name itself does not count: it keeps its own value.
        """
        found = {}
        names = self._control.past.names
        for name in set[str]().union(*(self._sent.get(rank, ()) for rank in ranks)):
            digests = {
                self._sent.get(rank, {}).get(name, "")
                for rank in ranks
                if name not in names.get(rank, ())
            }
            found[name] = digests.pop() if len(digests) == 1 else ""
        return found


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


def _name(name: str) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} can't be the name of a variable in Python.",
            'Write ranks["loss"].',
        )
    return name
