"""Where a cell or a script runs: hosts that are named, or nodes of a scheduler, for which it may have to wait.

A run in the background begins here, because it waits for its place on its own thread.
"""

from __future__ import annotations

import time
from dataclasses import replace

from distmagic.connection.link import Link
from distmagic.connection.prompts import NotebookAsker
from distmagic.connection.reach import Reaching
from distmagic.errors import Cancelled, SpecError
from distmagic.names import new_job
from distmagic.payload.blobs import in_use
from distmagic.payload.pack import Payload
from distmagic.payload.work_files import check_folder
from distmagic.render.screen import Screen
from distmagic.request.flags import Request
from distmagic.request.hosts import Host
from distmagic.request.spec import Access, JobSpec
from distmagic.runner.outcome import Detached, Run
from distmagic.session.background import BackgroundRun, BackgroundScreen
from distmagic.session.session import Session
from distmagic.state.fold import begin
from distmagic.systems.skypilot.cluster import Cluster
from distmagic.systems.slurm.allocation import Allocation


class Place:
    """The hosts of one run. Those that are known are being reached from the beginning; `reach` waits for the others.

    Either `hosts` or `allocation` says where it is.
    """

    def __init__(
        self, session: Session, access: Access, asker: NotebookAsker, spec: JobSpec | None,
        *, hosts: tuple[Host, ...] = (), allocation: Allocation | Cluster | None = None,
    ) -> None:  # fmt: skip
        self._session, self._access, self._asker, self._spec = (
            session,
            access,
            asker,
            spec,
        )
        self._allocation = allocation
        self._reaching: Reaching | None = None
        known = hosts if allocation is None else allocation.hosts
        if known or allocation is None:
            self._begin(known)
        else:
            allocation.awaited_by.add(asker)

    def _begin(self, hosts: tuple[Host, ...]) -> Reaching:
        self._reaching = self._session.reach(
            hosts, self._access, self._asker, self._spec
        )
        return self._reaching

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its hosts; of nodes that are still pending, their numbers."""
        if self._reaching is not None:
            return tuple(host.name for host in self._reaching.hosts)
        assert self._allocation is not None
        count = self._allocation.awaited
        return tuple(f"node {number}" for number in range(1, count + 1))

    def reach(
        self, screen: Screen | None = None, payload: Payload | None = None
    ) -> Reaching:
        """Return the links that are being opened; `screen` shows meanwhile what a pending allocation waits for.

        That may take hours, in which nobody on this machine removes the files of `payload`. Raises `SpecError` before that
        if its folder can't be sent.
        """
        if self._reaching is not None:
            return self._reaching
        allocation = self._allocation
        assert allocation is not None
        names = self.names

        def tell(text: str) -> None:
            if screen is not None:
                screen.show(begin("", names, notices=(text,)))

        if payload is not None and self._spec is not None:
            check_folder(payload, self._spec.sync)
        with in_use(payload.blobs if payload is not None else ()):
            hosts = allocation.wait(self._asker, tell)
        allocation.awaited_by.discard(self._asker)
        return self._begin(hosts)

    def cancel(self) -> None:
        """Give up. An allocation that is held stays for the next cell; one that is still pending is cancelled.

        It stays pending if another run waits for it too.
        """
        if self._reaching is not None:
            self._reaching.cancel()
        elif self._allocation is not None:
            self._allocation.awaited_by.discard(self._asker)
            if not self._allocation.hosts and not self._allocation.awaited_by:
                self._allocation.end()

    def interrupt(self) -> None:
        """Have `reach`, which waits on another thread, raise KeyboardInterrupt or why the allocation has ended."""
        if self._reaching is None:
            self.cancel()
            self._asker.interrupt()


def place_of(
    session: Session,
    request: Request,
    hosts: tuple[Host, ...],
    access: Access,
    asker: NotebookAsker,
) -> Place:
    """Return the place of a request: `hosts`, unless it asks a scheduler for nodes. Raises what `Session.allocation` raises."""
    spec = None if request.dry_run else request.spec
    if request.allocation is None:
        return Place(session, access, asker, spec, hosts=hosts)
    allocation = session.allocation(request.allocation, access, asker, request.spec)
    return Place(session, access, asker, spec, allocation=allocation)


def begin_in_background(
    session: Session,
    place: Place,
    spec: JobSpec,
    payload: Payload,
    screen: Screen,
    variable: str = "run",
) -> BackgroundRun:
    """Begin a run and return it at once. `screen` is shown the first state now: that makes the output of this cell.

    `variable` as for `Session.launch`.
    """
    job = new_job()
    state = begin(job, place.names, spec.max_restarts)
    state = replace(
        state,
        call=payload.title,
        name=spec.name or "",
        began_unix_s=time.time(),
        variable=variable,
    )
    shown = BackgroundScreen(state, screen)
    reached: list[Reaching] = []

    def launch() -> Run | Detached:
        try:
            reaching = place.reach(shown, payload)
        except KeyboardInterrupt:
            place.cancel()
            raise Cancelled(
                "Interrupted before anything was started on a host."
            ) from None
        except BaseException:
            place.cancel()
            raise
        reached.append(reaching)
        for future in reaching.futures:
            future.add_done_callback(session.background.end_before_connections)
        return session.launch(reaching, spec, payload, shown, job, variable)

    def give_up() -> None:
        if not reached:
            place.interrupt()

    def open_link(node_rank: int) -> Link:
        (reaching,) = reached  # there is a node
        name = shown.state.nodes[node_rank].host
        for host_index, host in enumerate(reaching.known):
            if host.name == name:
                return session.link_again(reaching, host_index)
        raise SpecError(f"{name} is not among the hosts of this run.")

    run = BackgroundRun(job, shown, launch, give_up, open_link)
    session.background.add(run)
    return run
