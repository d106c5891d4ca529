"""The place where a cell or a script runs: named hosts, or a scheduler's nodes, for which it may
have to wait.

A background run starts in this module, because it waits for its place on its own thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from distmagic import sanitize
from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link import Link
from distmagic.connection.link_opener import Fleet
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import (
    Cancelled,
    DistmagicError,
    PayloadTooLarge,
    RunError,
    UsageError,
)
from distmagic.names import new_job, owner
from distmagic.outcome.run import Run
from distmagic.payload.blobs import in_use
from distmagic.payload.pack import Payload
from distmagic.payload.work_files import check_folder, with_tree
from distmagic.planning.plan import terms_of
from distmagic.render.screen import Screen
from distmagic.request.access import Access
from distmagic.request.allocation import HostsRequest
from distmagic.request.hosts import Hosts
from distmagic.request.spec import JobSpec
from distmagic.runner.launch import first_state
from distmagic.runner.run_loop import Companion
from distmagic.session.background import BackgroundRun, BackgroundScreen, Left
from distmagic.session.session import Session
from distmagic.state.fold import begin
from distmagic.systems.protocol import Held


class Place:
    """The hosts of one run. Connecting to known hosts starts at once; `reach` waits for the others.

    Either `hosts` or `allocation` is set. `first_links` are the links to hosts that are known so
    far.
    """

    def __init__(
        self, session: Session, access: Access, asker: NotebookAsker, spec: JobSpec,
        *, hosts: Hosts = (), allocation: Held | None = None,
    ) -> None:  # fmt: skip
        self._session, self._access = session, access
        self._asker, self._spec = asker, spec
        self._allocation = allocation
        self.first_links: FirstLinks | None = None
        known = hosts if allocation is None else allocation.hosts
        if known or allocation is None:
            self._begin(known)
        else:
            allocation.awaited_by.add(asker)

    def _begin(self, hosts: Hosts) -> FirstLinks:
        self.first_links = self._session.reach(
            hosts, self._access, self._asker, self._spec
        )
        return self.first_links

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its hosts; for nodes that are still pending, their numbers."""
        if self.first_links is not None:
            return tuple(host.name for host in self.first_links.fleet.hosts)
        assert self._allocation is not None
        count = self._allocation.awaited
        return tuple(f"node {number}" for number in range(1, count + 1))

    def run(
        self,
        make_screen: Callable[[], Screen],
        pack: Callable[[Screen], Payload],
        variable: str = "run",
        *,
        in_background: bool = False,
    ) -> Left | BackgroundRun:
        """Run the payload from `pack`, and show the run; `variable` as for `Session.launch`.

        An error before the launch releases the hosts. Raises the errors of these and of `launch`.
        """
        with self.given_up_after_error():
            screen = make_screen()
            payload = pack(screen)
            if in_background:
                return self.begin(payload, screen, variable)
        return self.launch(payload, screen, variable)

    def launch(
        self, payload: Payload, screen: Screen, variable: str = "run", job: str = "",
        companion: Companion | None = None,
    ) -> Left:  # fmt: skip
        """Run a job at this place to its end, as `Session.launch`, and fetch its files.

        An interrupt while files are fetched raises `Cancelled` with the run, or the error of a
        failed run. A run that does not start leaves nothing.
        """
        with self.given_up_after_error():
            first_links = self.reach(screen, payload)
            for future in first_links.futures:
                future.add_done_callback(self._session.close_before_connections)
            payload = with_files(payload, self._spec, first_links.fleet, self._asker)
        try:
            left = self._session.launch(
                first_links, self._spec, payload, screen, job, variable, companion
            )
        except RunError as error:
            if isinstance(error.run, Run) and not isinstance(error, Cancelled):
                try:
                    fetch(error.run, self._spec.fetch)
                except Cancelled as interrupt:
                    print(interrupt, file=sys.stderr)  # noqa: T201 - the run's own error is raised
            raise
        if isinstance(left, Run):
            fetch(left, self._spec.fetch)
        return left

    def begin(
        self, payload: Payload, screen: Screen, variable: str = "run", companion: Companion | None = None,
    ) -> BackgroundRun:  # fmt: skip
        """Start a background run and return it at once.

        `screen` shows the first state now: that makes the output of this cell. `variable` and
        `companion` as for `Session.launch`.
        """
        job = new_job()
        terms = terms_of(
            self._spec,
            lease_s=self._access.lease_s,
            owner=owner(),
            call=payload.title,
        )
        state = first_state(job, self.names, self._spec, terms, variable)
        shown = BackgroundScreen(state, screen)
        launch = partial(self.launch, payload, shown, variable, job, companion)

        def open_link(node_rank: int) -> Link:
            first_links = self.first_links
            assert first_links is not None  # a node exists
            name = shown.state.nodes[node_rank].host
            names = first_links.fleet.names
            if name not in names:
                raise UsageError(f"{name} is not among the hosts of this run.")
            return first_links.opener.link_again(names.index(name))

        run = BackgroundRun(job, shown, launch, self.interrupt, open_link)
        self._session.background.add(run)
        return run

    def reach(
        self, screen: Screen | None = None, payload: Payload | None = None
    ) -> FirstLinks:
        """Wait for a pending allocation, if there is one, and return the links to its hosts, which
        are being opened.

        Meanwhile `screen` shows why it is pending. That may take hours: the files of `payload` are
        protected from cleanup. Raises `UsageError` before the wait if --sync has a folder that
        can't be sent.
        """
        if self.first_links is not None:
            return self.first_links
        allocation = self._allocation
        assert allocation is not None
        names = self.names

        def tell(text: str) -> None:
            if screen is not None:
                screen.show(begin("", names, notices=(text,)))

        if payload is not None:
            check_folder(payload, self._spec.sync)
        with in_use(payload.blobs if payload is not None else ()):
            hosts = allocation.wait(self._asker, tell)
        allocation.awaited_by.discard(self._asker)
        return self._begin(hosts)

    @contextmanager
    def given_up_after_error(self) -> Iterator[None]:
        """Release the place if the block ends with an error. An interrupt becomes `Cancelled`."""
        try:
            yield
        except KeyboardInterrupt as interrupt:
            self.cancel()
            raise _cancelled(interrupt) from None
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Release the place. An allocation that has started is kept for the next cell; a pending
        one is cancelled.

        It remains pending if another run waits for it too.
        """
        if self.first_links is not None:
            self.first_links.cancel()
        elif self._allocation is not None:
            self._allocation.awaited_by.discard(self._asker)
            if not self._allocation.hosts and not self._allocation.awaited_by:
                self._allocation.end()

    def interrupt(self) -> None:
        """Make `reach`, which waits on another thread, raise KeyboardInterrupt or the error of its
        allocation.
        """
        if self.first_links is None:
            self.cancel()
            self._asker.interrupt()


def with_files(
    payload: Payload, spec: JobSpec, fleet: Fleet, asker: NotebookAsker
) -> Payload:
    """Return the payload with all files that hosts need.

    Asks the user above the size limit. Raises `PayloadError`.
    """
    if all(host.is_local for host in fleet.hosts):
        return payload  # they are on this machine already
    try:
        return with_tree(payload, spec.sync, Path.cwd(), is_fresh=spec.fresh)
    except PayloadTooLarge as error:
        if not asker.confirm(f"{error.message} Send it anyway?"):
            raise
    return with_files(replace(payload, limit_bytes=sys.maxsize), spec, fleet, asker)


def fetch(run: Run, patterns: Sequence[str]) -> None:
    """Copy files of rank 0 to the current directory.

    A file that can't be fetched does not fail the run. An interrupt ends the copying alone, and
    raises `Cancelled` with the run.
    """
    for number, pattern in enumerate(patterns):
        try:
            paths = run.fetch(pattern)
        except KeyboardInterrupt:
            left = tuple(patterns[number:])
            run.unfetched += left
            calls = [f"{run.state.variable}.fetch({one!r})" for one in left]
            interrupted = Cancelled(
                "The run was over, and the copying of its files was interrupted.",
                f"To go on with it: {'; '.join(calls)}",
            )
            interrupted.run = run
            raise interrupted from None
        except DistmagicError as error:
            print(f"--fetch {pattern}: {error}", file=sys.stderr)  # noqa: T201 - a line for people
            run.unfetched += (pattern,)
        else:
            # A host has chosen these names.
            names = sanitize.line(", ".join(map(str, paths)))
            print(f"fetched {names}", file=sys.stderr)  # noqa: T201


def place_of(
    session: Session,
    hosts: Hosts | HostsRequest,
    access: Access,
    asker: NotebookAsker,
    spec: JobSpec,
) -> Place:
    """Return the place of a run: hosts, or a request to a scheduler.

    Raises the errors of `Allocations.get`.
    """
    if not isinstance(hosts, HostsRequest):
        return Place(session, access, asker, spec, hosts=hosts)
    allocation = session.allocations.get(
        hosts, access, asker, owner(), is_elastic=spec.is_elastic
    )
    return Place(session, access, asker, spec, allocation=allocation)


def _cancelled(interrupt: KeyboardInterrupt) -> Cancelled:
    """Return the error of an interrupt before the launch, with the user's own lines that IPython
    shows.
    """
    if isinstance(interrupt, Cancelled):
        return interrupt
    cancelled = Cancelled("Interrupted before anything was started on a host.")
    render_lines = getattr(interrupt, "_render_traceback_", None)
    if render_lines is not None:

        def render() -> list[str]:
            return [*render_lines(), *Cancelled._render_traceback_(cancelled)]

        cancelled._render_traceback_ = render  # type: ignore[method-assign]
    return cancelled
