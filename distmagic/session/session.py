"""A kernel's session: runs jobs on hosts, follows jobs that were started before, and keeps
processes on hosts warm.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager

from distmagic.comparison.compare import RunHistory
from distmagic.connection.connections import Connections, connect
from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link_opener import Fleet, LinkOpener
from distmagic.connection.prompts import NotebookAsker
from distmagic.connection.warm_hosts import WarmHosts
from distmagic.names import new_job, owner, work_dir
from distmagic.outcome.post_mortem import FailedRuns
from distmagic.payload.pack import Payload
from distmagic.planning.jobs import Job
from distmagic.render.screen import Screen
from distmagic.request.access import Access
from distmagic.request.hosts import LOCALHOST, Host, Hosts
from distmagic.request.spec import JobSpec
from distmagic.runner.launch import attach, launch
from distmagic.runner.run_loop import Companion
from distmagic.session.allocations import Allocations
from distmagic.session.background import BackgroundRuns, Left
from distmagic.session.ending import left_of
from distmagic.session.housekeeping import Housekeeping
from distmagic.session.inside import Inside
from distmagic.tracking.screen import TrackedScreen
from distmagic.transports import Transport
from distmagic.transports.asking import Asker

_BEGUN = 50  # number of jobs whose hosts are remembered


class Session:
    """The state of a kernel between runs: open connections, and warm processes on hosts, which
    belong to `kernel`.
    """

    def __init__(self, connections: Connections | None = None) -> None:
        self._connections = connections or Connections(self._connect)
        self._warm_hosts = WarmHosts(self._connections)
        self.allocations = Allocations(connect)
        self.background = BackgroundRuns()
        self.history = RunHistory()
        self.failed_runs = FailedRuns()
        self.kernel = self._warm_hosts.kernel
        self.housekeeping = Housekeeping(self.kernel)
        self.inside = Inside(self.kernel, self._connections.own_link)
        self._followed: set[str] = set()  # jobs that this kernel follows now
        self._begun: dict[str, Fleet] = {}  # jobs by name, in order of their start

    def _connect(self, host: Host, access: Access, asker: Asker) -> Transport:
        """Return a transport to a host: over its own connection to this node, through its
        allocation, or directly.
        """
        if host.allocation is None:
            return connect(host, access, asker)
        part = self.inside.current
        if part is not None and host.allocation == part.source:
            return part.transport(host)
        return self.allocations.transport(host, access, asker)

    @property
    def begun(self) -> tuple[str, ...]:
        """The names of the last jobs that this kernel started, newest first."""
        return tuple(reversed(self._begun))

    def begun_at(self, job_name: str) -> Fleet | None:
        """Return the hosts of a job that this kernel started; None for any other job.

        `job_name` may be a unique prefix of its name.
        """
        if job_name in self._begun:
            return self._begun[job_name]
        fits = [name for name in self._begun if job_name and name.startswith(job_name)]
        return self._begun[fits[0]] if len(fits) == 1 else None

    def reach(
        self, hosts: Hosts, access: Access, asker: NotebookAsker, spec: JobSpec | None = None,
        spare: Hosts = (),
    ) -> FirstLinks:  # fmt: skip
        """Start to connect to hosts, in the background; no host means this machine.

        `spec` describes the coming run. `spare` hosts are only named for now: they may join a job
        that is followed. Raises `PayloadError` if this machine can't store the files to send.
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
        """Run a job to its end and return its `Run`; for a job to be detached, return once it has
        started.

        `variable` is the name of the run's variable in messages. A `companion` takes part in its
        loop. Raises a `PayloadError` or a `HostError` before anything is started, or a `RunError`
        that carries the `Run`; for an interrupt at any time, `Cancelled`.
        """
        work = work_dir(spec, payload)
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
                    variable,
                )
        except BaseException:
            if not first_links.is_settled:  # no host has anything of it
                self._begun.pop(job, None)
            raise
        return left_of(self, followed, first_links.opener, screen)

    def attach(
        self, first_links: FirstLinks, job: Job, screen: Screen, variable: str = "run",
        companion: Companion | None = None,
    ) -> Left:  # fmt: skip
        """Follow a job from its first event to its end, as if this kernel had started it.

        An interrupt ends the job; for a detached job it only ends the following. `first_links` lead
        to the job's own hosts in the order of its nodes. Those that are down are retried, as after
        a broken connection. `variable` and `companion` as for `launch`, and so are the errors of
        the run.
        """
        with self._following(job.name):
            followed = attach(first_links, job, screen, companion, variable)
        return left_of(self, followed, first_links.opener, screen)

    @contextmanager
    def _following(self, job: str) -> Iterator[None]:
        """Mark a job as followed by this kernel, so that another run of it, in another thread, does
        not interfere.
        """
        self._followed.add(job)
        try:
            yield
        finally:
            self._followed.discard(job)

    def close_before_connections(self, _: object) -> None:
        """Call `close` when Python ends.

        Registered last, it runs before paramiko closes all connections.
        """
        atexit.unregister(self.close)
        atexit.register(self.close)

    def down(self) -> tuple[str, ...]:
        """End this kernel's warm processes on hosts, and close all connections; return the
        unreachable hosts.
        """
        names = self._warm_hosts.end(self.allocations.hosts)
        self._connections.close()
        self.allocations.end()
        return names

    def close(self) -> None:
        """End warm processes over idle links, and close all connections.

        Background runs end first. Allocations end too, except those with a running detached job.
        """
        self.background.close()
        self._connections.close()
        self.allocations.leave()
        self.inside.close()
