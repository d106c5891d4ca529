"""A kernel's session with its hosts: runs jobs there, follows those that were started before, and keeps hosts warm."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from distmagic.comparison.compare import RunHistory
from distmagic.connection.connections import Connections, connect
from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link_opener import Fleet, LinkOpener
from distmagic.connection.prompts import NotebookAsker
from distmagic.connection.warm_hosts import WarmHosts
from distmagic.names import new_job, owner, work_dir
from distmagic.payload.pack import Payload
from distmagic.planning.jobs import Job
from distmagic.render.screen import Screen
from distmagic.request.access import Access
from distmagic.request.hosts import LOCALHOST, Host
from distmagic.request.spec import JobSpec
from distmagic.runner.launch import attach, launch
from distmagic.runner.run_loop import Companion
from distmagic.screens.changed import ChangedScreen
from distmagic.session.allocations import Allocations
from distmagic.session.background import BackgroundRuns
from distmagic.session.ending import Left, RunEnding
from distmagic.session.housekeeping import Housekeeping
from distmagic.session.inside import Inside
from distmagic.tracking.screen import TrackedScreen
from distmagic.transports import Transport
from distmagic.transports.asking import Asker

_BEGUN = 50  # jobs of which it is remembered where they were begun


class Session:
    """What a kernel keeps between runs: open connections, and warm processes on hosts, which know it as `kernel`."""

    def __init__(self, connections: Connections | None = None) -> None:
        self._connections = connections or Connections(self._connect)
        self._warm_hosts = WarmHosts(self._connections)
        self.allocations = Allocations(connect)
        self.background = BackgroundRuns()
        self.history = RunHistory()
        self.kernel = self._warm_hosts.kernel
        self.housekeeping = Housekeeping(self.kernel)
        self.inside = Inside(self.kernel, self._connections.own_link)
        self._ending = RunEnding(
            reach=self.reach,
            attach=self.attach,
            housekeeping=self.housekeeping,
            allocations=self.allocations,
            history=self.history,
        )
        self._followed: set[str] = set()  # jobs that this kernel follows just now
        self._begun: dict[str, Fleet] = {}  # jobs, in order

    def _connect(self, host: Host, access: Access, asker: Asker) -> Transport:
        """Return a way to a host: as it has dialled, through its allocation, or by itself."""
        if host.allocation is None:
            return connect(host, access, asker)
        if host.allocation == self.inside.source:
            return self.inside.transport(host)
        return self.allocations.transport(host, access, asker)

    @property
    def begun(self) -> tuple[str, ...]:
        """The names of the last jobs that this kernel began, the newest first."""
        return tuple(reversed(self._begun))

    def begun_at(self, job_name: str) -> Fleet | None:
        """Return the hosts of a job that this kernel began; None for any other job.

        `job_name` may be the beginning of a name that only one of them has.
        """
        if job_name in self._begun:
            return self._begun[job_name]
        fits = [name for name in self._begun if job_name and name.startswith(job_name)]
        return self._begun[fits[0]] if len(fits) == 1 else None

    def reach(
        self, hosts: tuple[Host, ...], access: Access, asker: NotebookAsker, spec: JobSpec | None = None,
        spare: tuple[Host, ...] = (),
    ) -> FirstLinks:  # fmt: skip
        """Begin to reach hosts, in the background; no host means this machine. `spec` is the run that is to come.

        Of `spare` hosts only the names are needed for now: they may come to a job that is followed. Raises `PayloadError`
        where this machine can't keep what is sent.
        """
        hosts = hosts or (LOCALHOST,)
        opener = LinkOpener(
            connections=self._connections,
            fleet=Fleet(hosts=hosts, access=access, spare=spare),
            asker=asker,
        )
        return FirstLinks(opener, self._warm_hosts, spec)

    def launch(
        self, first_links: FirstLinks, spec: JobSpec, payload: Payload, screen: Screen,
        job: str = "", variable: str = "run", companion: Companion | None = None,
    ) -> Left:  # fmt: skip
        """Run a job to its end and return what is left of it; one that is to be detached only until it has begun.

        `variable` is the one that gets the run, as messages name it. A `companion` takes part in its loop.
        Raises a `PayloadError` or a `HostError` before anything is started, or a `RunError` that carries the `Run`; for
        an interrupt at any time, `Cancelled`.
        """
        work = work_dir(spec, payload)
        screen = ChangedScreen(screen, lambda state: replace(state, variable=variable))
        if spec.track is not None:
            screen = TrackedScreen(screen, spec.track)
        job = job or new_job()
        self._begun[job] = first_links.fleet
        if len(self._begun) > _BEGUN:
            del self._begun[next(iter(self._begun))]
        try:
            with self._following(job):
                followed = launch(
                    first_links,
                    spec,
                    payload,
                    screen,
                    job,
                    owner(),
                    work,
                    self._followed,
                    companion,
                )
        except BaseException:
            if not first_links.is_settled:  # there is nothing of it on any host
                self._begun.pop(job, None)
            raise
        return self._ending.left_of(followed, first_links.opener, screen, variable)

    def attach(
        self, first_links: FirstLinks, job: Job, screen: Screen, variable: str = "run"
    ) -> Left:
        """Follow a job from its first event to its end, as if this kernel had started it.

        An interrupt ends it; of a detached job it only ends the following.

        `first_links` lead to the job's own hosts in the order of its nodes; those that are down are tried again and again, as
        when a connection breaks. `variable` as for `launch`, and so is what it raises for a run.
        """
        screen = ChangedScreen(screen, lambda state: replace(state, variable=variable))
        with self._following(job.name):
            followed = attach(first_links, job, screen)
        return self._ending.left_of(followed, first_links.opener, screen, variable)

    @contextmanager
    def _following(self, job: str) -> Iterator[None]:
        """Have a job count as followed by this kernel: another run of it, in another thread, is not in its way."""
        self._followed.add(job)
        try:
            yield
        finally:
            self._followed.discard(job)

    def close_before_connections(self, _: object) -> None:
        """Have `close` called when Python ends: last registered, it comes before paramiko closes all connections."""
        atexit.unregister(self.close)
        atexit.register(self.close)

    def down(self) -> tuple[str, ...]:
        """End what hosts keep loaded for this kernel, and close all connections; return the hosts that can't be reached."""
        names = self._warm_hosts.end(self.allocations.hosts)
        self._connections.close()
        self.allocations.end()
        return names

    def close(self) -> None:
        """End what hosts keep loaded, where a conversation rests, and close all connections.

        Runs in the background end before. Allocations end too, but for those on which a detached job runs.
        """
        self.background.close()
        self._connections.close()
        self.allocations.leave()
        self.inside.close()
