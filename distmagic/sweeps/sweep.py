"""A parameter sweep: runs with all combinations of some arguments, side by side, the rest in a
queue.

the arguments           --combinations-->  one call for each run                     (pure)
hosts, and their GPUs   --slots-->         Slot: a place for one run at a time       (pure)
both                    --Sweep-->         background runs, and one table of them
"""

from __future__ import annotations

import contextvars
import itertools
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from distmagic.comparison.compare import Comparison
from distmagic.comparison.summary import RunSummary, summary
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import UsageError
from distmagic.outcome.shown import cell_number, kernel
from distmagic.payload.blobs import in_use
from distmagic.payload.pack import Payload
from distmagic.payload.sizes import plural
from distmagic.remote.frozen import frozen
from distmagic.remote.system import threads
from distmagic.render.screen import Screen
from distmagic.render.text_width import one_line
from distmagic.request.access import Access
from distmagic.request.allocation import HostsRequest
from distmagic.request.hosts import Host, Hosts
from distmagic.request.spec import JobSpec
from distmagic.session.background import BackgroundRun
from distmagic.session.place import place_of
from distmagic.session.session import Session

_SHOW_S = 1.0
_CHARACTERS_PER_S = 100_000  # which suits a slow line


@frozen
class Slot:
    """A place for one run at a time: a host with the number of ranks of a run, and its devices, ()
    without GPUs.
    """

    host: Host
    devices: tuple[str, ...] = ()


def combinations(grid: Mapping[str, Iterable[Any]]) -> tuple[dict[str, Any], ...]:
    """Return the arguments of each run: all combinations of the values; the last name varies
    fastest. Raises `UsageError`.
    """
    values = []
    for name, given in grid.items():
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise UsageError(
                f"{name}={given!r} is no list of values.",
                f"Write {name!r}: [{given!r}], or give it to every run by kwargs.",
            )
        values.append(list(given))
    found = itertools.product(*values)
    calls = tuple(dict(zip(grid, one, strict=True)) for one in found)
    if not grid or not calls:
        raise UsageError(
            "The sweep has no run: no argument has a value.",
            'Give each argument a list of values: {"lr": [0.1, 0.01]}.',
        )
    return calls


def slots(
    hosts: Sequence[Host], gpus: Sequence[int], ranks: int, devices: Sequence[str] = ()
) -> tuple[Slot, ...]:
    """Return the places for runs with `ranks` ranks each.

    `gpus` has the number of GPUs of each host. A host's capacity is the number after its name
    (`gpu-a:4`), else its number of GPUs, else one run. If `devices` are given, only these are used.
    Raises `UsageError`.
    """
    found = []
    for host, count in zip(hosts, gpus, strict=True):
        named = tuple(devices) or tuple(map(str, range(count)))
        room = host.slots if isinstance(host.slots, int) else len(named) or ranks
        if named and room > len(named):
            raise UsageError(
                f"{host.name} has {plural(len(named), 'device')} for this sweep, and {room} were named.",
                f"Write {host.name}:{len(named)}, or less.",
            )
        for first in range(0, room - ranks + 1, ranks):
            own = named[first : first + ranks]
            found.append(Slot(host=replace(host, slots=ranks), devices=own))
    if not found:
        raise UsageError(
            f"No host has room for the {plural(ranks, 'rank')} of a run.",
            "Give a run fewer by nproc_per_node, or a host more: gpu-a:8.",
        )
    return tuple(found)


class Sweep:
    """The runs of a sweep, which continue in the background.

    As a cell's value it is a table with one row for each run. `runs` are the started runs by name,
    `failed` the errors of failed ones. `wait()` waits for all, `stop()` ends them. `rerun()` queues
    the failed runs again, `rerun("NAME")` any finished run.
    """

    def __init__(
        self,
        titles: Mapping[str, str],
        free: Sequence[Slot],
        start: Callable[[str, Slot], BackgroundRun],
    ) -> None:
        """Start the sweep. `titles` maps the runs' names to their calls; `start` starts one run."""
        self.runs: dict[str, BackgroundRun] = {}
        self.failed: dict[str, BaseException] = {}
        self._titles = titles
        self._start = start
        self._free = list(free)
        self._slots = len(self._free)
        self._queue = list(titles)
        self._hosts: dict[str, str] = {}
        self._has_changed = threading.Condition()
        self._display_ids: list[str] = []
        self._shown_in: int | None = None
        with self._has_changed:
            try:
                self._begin()
            # An interrupt: nobody gets this object, and could stop it.
            except BaseException:
                self._end()
                raise

    def _begin(self) -> None:
        """Start as many runs as have room. The caller holds the lock."""
        for name in tuple(self._queue):
            # A rerun goes to the host that has its files.
            before = self._hosts.get(name)
            fits = [one for one in self._free if before in (None, one.host.name)]
            if not fits:
                continue
            self._queue.remove(name)
            try:
                self.runs[name] = self._start(name, fits[0])
                # It waits for the lock.
                threads.begin("sweep", self._follow, name, fits[0])
            except Exception as error:  # noqa: BLE001 - the others go on
                self.failed[name] = error
                continue
            self._hosts[name] = fits[0].host.name
            self._free.remove(fits[0])

    def _follow(self, name: str, slot: Slot) -> None:
        error = None
        try:
            self.runs[name].wait()
        except BaseException as its_end:  # noqa: BLE001 - of the run, of whatever kind
            error = its_end
        with self._has_changed:
            if error is not None:
                self.failed[name] = error
            self._free.append(slot)
            self._begin()
            self._has_changed.notify_all()

    @property
    def done(self) -> bool:
        """Whether all runs have ended."""
        return not self._queue and len(self._free) == self._slots

    def wait(self, timeout_s: float | None = None) -> Sweep:
        """Wait for the end of all runs, and return self.

        Raises `TimeoutError`. An interrupt only ends the wait.
        """
        with self._has_changed:
            if not self._has_changed.wait_for(lambda: self.done, timeout_s):
                raise TimeoutError(f"the sweep still goes on after {timeout_s:g} s")
        for display_id in self._display_ids:
            # The end of the cell makes this output final.
            self._display(display_id, update=True)
        return self

    def stop(self) -> None:
        """End all runs, and start no other."""
        with self._has_changed:
            self._end()
        self.wait()

    def _end(self) -> None:
        """Ask all runs to end. The caller holds the lock."""
        self._queue.clear()
        for run in self.runs.values():
            if not run.done:
                run.ask_to_stop()
                run.stop_waiting()

    def rerun(self, *names: str) -> None:
        """Queue finished runs again; without a name, all failed ones. Raises `UsageError`."""
        with self._has_changed:
            asked = tuple(dict.fromkeys(names or self.failed))
            for name in asked:
                run = self.runs.get(name)
                if name not in self._titles:
                    raise UsageError(
                        f"{name} is no run of this sweep.",
                        f"Its runs: {', '.join(self._titles)}.",
                    )
                if name in self._queue or not (run is None or run.done):
                    raise UsageError(f"{name} is not over.", "Wait for its end.")
            for name in asked:
                self.failed.pop(name, None)
                self._queue.append(name)
            self._begin()
        self.show()

    # ---- the table

    @property
    def table(self) -> Comparison:
        """A table of the runs so far, with the arguments that differ as columns."""
        return Comparison([self._row(name) for name in self._titles])

    def _row(self, name: str) -> RunSummary:
        run = self.runs.get(name)
        if run is not None and name not in self._queue:
            return replace(summary(run.state), label=name)
        phase, note = "queued" if name in self._queue else "stopped", ""
        if name in self.failed:
            phase, note = "failed", one_line(str(self.failed[name]))
        return RunSummary(
            job="",
            call=self._titles[name],
            label=name,
            phase=phase,
            took_s=0.0,
            ranks=0,
            metrics={},
            note=note,
        )

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    def show(self) -> None:
        """In a notebook, show the table in the output of this cell, and update it during the
        runs.
        """
        if kernel() is not None:
            self._shown_in = cell_number()
            self._display_ids.append(f"distmagic-{secrets.token_hex(8)}")
            self._display(self._display_ids[-1], update=False)
            renew = contextvars.copy_context().run
            threads.begin("sweep", renew, self._renew, self._display_ids[-1])

    def _renew(self, display_id: str) -> None:
        is_over, pause_s = False, _SHOW_S
        while not is_over:
            with self._has_changed:
                is_over = self._has_changed.wait_for(lambda: self.done, pause_s)
            size = self._display(display_id, update=True)
            pause_s = max(_SHOW_S, size / _CHARACTERS_PER_S)

    def _display(self, display_id: str, *, update: bool) -> int:
        """Display the table, and return its size in characters."""
        from IPython.display import display

        table = self.table
        html = table._repr_html_()
        page = {"text/plain": repr(table), "text/html": html}
        display(page, raw=True, display_id=display_id, update=update)
        return len(html)

    def _ipython_display_(self) -> None:
        """Show the table, unless this cell already shows it."""
        if kernel() is None:
            raise NotImplementedError  # IPython then uses the text
        if self._shown_in is None or self._shown_in != cell_number():
            self.show()


def begin_sweep(
    session: Session,
    where: Hosts | HostsRequest,
    access: Access,
    asker: NotebookAsker,
    spec: JobSpec,
    payloads: Mapping[str, Payload],
    directories: Mapping[str, str],
) -> Sweep:
    """Start a run for each payload, as room allows. Raises the errors of connecting to hosts.

    `directories` are the names of the runs' own working directories on the hosts; both are keyed by
    run name.
    """
    ranks = spec.nproc_per_node or 1
    if not isinstance(ranks, int) or spec.detach or spec.nnodes not in (None, (1, 1)):
        raise UsageError(
            "Each run of a sweep has a number of ranks on one host, and is followed.",
            "Leave out detach and nnodes, and write nproc_per_node=2.",
        )
    place = place_of(session, where, access, asker, spec)
    with place.given_up_after_error():
        first_links = place.reach()
        with first_links.opened() as links:
            gpus = [link.facts.gpus for link in links.values()]
        free = slots(first_links.fleet.hosts, gpus, ranks, spec.devices)

    def start(name: str, slot: Slot) -> BackgroundRun:
        if session.background.is_closed:
            raise UsageError("This process ends: no further run of the sweep begins.")
        directory = directories[name]
        of_run = replace(
            spec, name=directory, devices=slot.devices, nproc_per_node=None
        )
        with closing(NotebookAsker(can_ask=False)) as nobody:
            place = place_of(session, (slot.host,), access, nobody, of_run)
            return place.begin(payloads[name], Screen())

    titles = {name: payload.title for name, payload in payloads.items()}
    sweep = Sweep(titles, free, start)
    # Queued runs do not use them yet.
    files = [blob for payload in payloads.values() for blob in payload.blobs]

    def keep() -> None:
        with in_use(files):
            sweep.wait()

    threads.begin("sweep", keep)
    sweep.show()
    return sweep
