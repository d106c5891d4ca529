"""A kernel's session with its hosts: runs jobs there, follows those that were started before, and keeps hosts warm."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from distmagic import sanitize
from distmagic.comparison.compare import RunHistory
from distmagic.connection.connections import Connections, connect
from distmagic.connection.link import Link
from distmagic.connection.parallel import in_parallel
from distmagic.connection.prompts import NotebookAsker, asker_of
from distmagic.connection.reach import UNKNOWN_HOST, Reaching
from distmagic.errors import Cancelled, DistmagicError, PayloadTooLarge, WorkerFailed
from distmagic.names import new_job, owner, work_dir
from distmagic.payload import blobs
from distmagic.payload.bundle import build
from distmagic.payload.pack import Payload
from distmagic.payload.work_files import begins_in, with_tree
from distmagic.planning import plan as planning
from distmagic.planning.jobs import Job, choose, known_whereabouts, whereabouts
from distmagic.remote.wire.protocol import EndTemplates, Templates
from distmagic.render.screen import Screen
from distmagic.request.allocation import HostsRequest
from distmagic.request.hosts import INSIDE, LOCALHOST, Host
from distmagic.request.spec import Access, JobSpec
from distmagic.runner.launch import Followed, attach, enough_hosts, launch
from distmagic.runner.outcome import Detached, Run
from distmagic.runner.prepare import prepare
from distmagic.screens.choose import screen_for
from distmagic.screens.named import NamedScreen
from distmagic.session.allocations import Allocations, preview
from distmagic.session.background import BackgroundRuns
from distmagic.session.housekeeping import Housekeeping
from distmagic.session.inside import Inside
from distmagic.session.local_hints import local_hint
from distmagic.state.verdict import INTERRUPTED_WHEN_OVER, verdict
from distmagic.systems.skypilot.cluster import Cluster
from distmagic.systems.slurm.allocation import Allocation
from distmagic.systems.slurm.job_states import JobState
from distmagic.transports import Transport
from distmagic.transports.asking import Asker

_BEGUN = 50  # jobs of which it is remembered where they were begun
_SOON_S = 3.0  # to connect to a host that only has to be told to end something


class Session(Housekeeping):
    """What a kernel keeps between runs: its open connections, and what hosts keep loaded for it (by `kernel`)."""

    def __init__(self, connections: Connections | None = None) -> None:
        self._connections = connections or Connections(self._connect)
        self._allocations = Allocations(connect)
        self.inside: Inside | None = None  # set by `inside.part_of`
        self.background = BackgroundRuns()
        self.history = RunHistory()
        self.kernel = secrets.token_hex(6)
        # Hosts that were asked to keep something loaded.
        self._warmed: dict[Host, tuple[Access, str]] = {}
        self._followed: set[str] = set()  # jobs that this kernel follows just now
        self._begun: dict[str, tuple[tuple[Host, ...], Access]] = {}  # jobs, in order

    def _connect(self, host: Host, access: Access, asker: Asker) -> Transport:
        """Return a way to a host: as it has dialled, through its allocation, or by itself."""
        if self.inside is not None and host.allocation.startswith(INSIDE):
            return self.inside.transport(host)
        return (
            self._allocations.transport(host, access, asker)
            if host.allocation
            else connect(host, access, asker)
        )

    def allocation(
        self, request: HostsRequest, access: Access, asker: NotebookAsker, spec: JobSpec
    ) -> Allocation | Cluster:
        """Return the allocation of a run that is to come; where none is held, one is submitted and pending.

        Raises `SpecError` where the scheduler refuses it, and `Unreachable`.
        """
        return self._allocations.get(
            request, access, asker, owner(), is_elastic=spec.is_elastic
        )

    def preview(self, request: HostsRequest, access: Access, spec: JobSpec) -> str:
        """Return what would be submitted for an allocation; nothing is."""
        return preview(request, access, owner(), is_elastic=spec.is_elastic)

    def allocations(
        self, login: str, access: Access, asker: NotebookAsker
    ) -> tuple[JobState, ...]:
        """Return all allocations of this user, also those of other kernels."""
        return self._allocations.listed(login, access, asker)

    @property
    def clusters(self) -> tuple[str, ...]:
        """The names of the clusters of SkyPilot that this kernel uses."""
        return self._allocations.clusters

    def take_down(self, cluster: str, asker: NotebookAsker) -> str:
        """Take a cluster of SkyPilot down, and return what SkyPilot says. Raises `SpecError` and `Unreachable`."""
        return self._allocations.take_down(cluster, asker)

    @property
    def begun(self) -> tuple[str, ...]:
        """The names of the last jobs that this kernel began, the newest first."""
        return tuple(reversed(self._begun))

    def begun_at(self, job_name: str) -> tuple[tuple[Host, ...], Access] | None:
        """Return the hosts of a job that this kernel began, and the way to them; None for any other job.

        `job_name` may be the beginning of a name that only one of them has.
        """
        if job_name in self._begun:
            return self._begun[job_name]
        fits = [name for name in self._begun if job_name and name.startswith(job_name)]
        return self._begun[fits[0]] if len(fits) == 1 else None

    @property
    def allocated(self) -> tuple[Host, ...]:
        """The nodes that this kernel holds."""
        return self._allocations.hosts

    def reach(
        self, hosts: tuple[Host, ...], access: Access, asker: NotebookAsker, spec: JobSpec | None = None,
        spare: tuple[Host, ...] = (),
    ) -> Reaching:  # fmt: skip
        """Begin to reach hosts, in the background; no host means this machine. `spec` is the run that is to come.

        Of `spare` hosts only the names are needed for now: they may come to a job that is followed. Raises `SpecError`
        where this machine's limits are too low for so many hosts, and `PayloadError` where it can't keep what is sent.
        """
        blobs.folder()  # once here, in place of once for each host
        hosts = hosts or (LOCALHOST,)
        self._connections.check_room(hosts, access)
        pythons = tuple(python_of(host, access) for host in (*hosts, *spare))

        def open_link(host: Host, python: str) -> Link:
            link = self._connections.take_idle(host, access, asker, python, build())
            link.warm = (
                planning.warming(spec, access, host, link.facts, self.kernel)
                if spec
                else None
            )
            if link.warm is not None:
                link.kept = link.warm
                self._warmed[host] = access, python
                # No answer: where that can't be, the job starts without it.
                link.send(link.warm)
            return link

        return Reaching(
            hosts, access, asker, self._connections, pythons, open_link, spare
        )

    def dry_run(
        self,
        reaching: Reaching,
        spec: JobSpec,
        program: str = "<the cell>",
        payload: Payload | None = None,
    ) -> str:
        """Return the commands that a run would start on every host, having started nothing. `payload` is a script's."""
        with reaching.opened(enough_hosts(spec, reaching), needs_remote=True) as links:
            there = list(links.values())
            inside = begins_in(payload, spec.sync, Path.cwd())
            lease_s = reaching.access.lease_s
            plan, _ = prepare(
                there,
                spec,
                new_job(),
                lease_s=lease_s,
                owner=owner(),
                work=replace(work_dir(spec, payload), inside=inside),
            )
            return planning.commands(
                plan, [link.facts.executable for link in there], program
            )

    def own_link(self, access: Access) -> Link:
        """Open one more link to this machine."""
        with closing(asker_of()) as asker:
            python = python_of(LOCALHOST, access)
            return self._connections.link(LOCALHOST, access, asker, python, build())

    def link_again(self, reaching: Reaching, host_index: int) -> Link:
        """Open one more link to a host of a run that nobody asks for any more; questions are asked on this thread."""
        with closing(asker_of()) as asker:
            return reaching.link_after_run(host_index, asker)

    def launch(
        self, reaching: Reaching, spec: JobSpec, payload: Payload, screen: Screen,
        job: str = "", variable: str = "run",
    ) -> Run | Detached:  # fmt: skip
        """Run a job to its end and return what is left of it; one that is to be detached only until it has begun.

        `variable` is the one that gets the run, as messages name it.
        Raises a `PayloadError` or a `HostError` before anything is started, or a `RunError` that carries the `Run`; for
        an interrupt at any time, `Cancelled`.
        """
        try:
            payload = self._with_files(reaching, spec, payload)
        except KeyboardInterrupt:
            reaching.cancel()
            raise Cancelled(
                "Interrupted before anything was started on a host."
            ) from None
        except BaseException:
            reaching.cancel()
            raise
        work = work_dir(spec, payload)
        screen = NamedScreen(screen, variable)
        job = job or new_job()
        self._begun[job] = reaching.hosts, reaching.access
        if len(self._begun) > _BEGUN:
            del self._begun[next(iter(self._begun))]
        try:
            with self._following(job):
                followed = launch(
                    reaching, spec, payload, screen, job, owner(), work, self._followed
                )
        except BaseException:
            if not reaching.is_settled:  # there is nothing of it on any host
                self._begun.pop(job, None)
            raise
        left = self._finish(followed, reaching, screen, variable)
        if isinstance(left, Run):
            fetch(left, spec.fetch)
        return left

    def _with_files(
        self, reaching: Reaching, spec: JobSpec, payload: Payload
    ) -> Payload:
        """Return the payload with all files that hosts need. Above the limit the user is asked."""
        if all(host.is_local for host in reaching.hosts):
            return payload  # they are here
        try:
            return with_tree(payload, spec.sync, Path.cwd(), is_fresh=spec.fresh)
        except PayloadTooLarge as error:
            if not reaching.asker.confirm(f"{error.message} Send it all the same?"):
                raise
        return with_tree(
            replace(payload, limit_bytes=sys.maxsize),
            spec.sync,
            Path.cwd(),
            is_fresh=spec.fresh,
        )

    def attach(
        self, reaching: Reaching, job: Job, screen: Screen, variable: str = "run"
    ) -> Run | Detached:
        """Follow a job from its first event to its end, as if this kernel had started it.

        An interrupt ends it; of a detached job it only ends the following.

        `reaching` are the job's own hosts in the order of its nodes; those that are down are tried again and again, as
        when a connection breaks. `variable` as for `launch`, and so is what it raises for a run.
        """
        screen = NamedScreen(screen, variable)
        with self._following(job.name):
            followed = attach(reaching, job, screen)
        return self._finish(followed, reaching, screen, variable)

    @contextmanager
    def _following(self, job: str) -> Iterator[None]:
        """Have a job count as followed by this kernel: another run of it, in another thread, is not in its way."""
        self._followed.add(job)
        try:
            yield
        finally:
            self._followed.discard(job)

    # ---- the end of a run

    def _finish(
        self,
        followed: Followed,
        reaching: Reaching,
        screen: Screen,
        variable: str,
    ) -> Run | Detached:
        """Return what is left of a run. Raises the error that its end means, which carries the `Run`."""
        state = replace(followed.state, variable=variable)
        if not state.is_over:
            return self._leave(followed, reaching, screen)

        host_indices = followed.host_indices

        def open_link(node_rank: int) -> Link:
            return self.link_again(reaching, host_indices[node_rank])

        self.history.add(state)
        error = verdict(state)
        if error is None and followed.was_interrupted:
            error = Cancelled(INTERRUPTED_WHEN_OVER)
        small_results = {}
        for rank, worker in state.workers.items():
            data = followed.small_results.get((worker.node_rank, rank))
            if data is not None:
                small_results[rank] = data
        run = Run(state, small_results, open_link, shown=error is None)
        if error is None:
            return run
        error.run = run
        if isinstance(error, WorkerFailed) and (hint := local_hint(state, Path.cwd())):
            error.hint = f"{hint}\n{error.hint}"
        self._allocations.advise(reaching.hosts, error)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame: the two would keep each other, and the run, alive

    def _leave(
        self, followed: Followed, reaching: Reaching, screen: Screen
    ) -> Detached:
        """Let a detached job go on, and return what finds it again."""
        state = followed.state
        indices = dict.fromkeys(
            index for index in followed.host_indices if index != UNKNOWN_HOST
        )
        hosts = tuple(dict.fromkeys(reaching.known[index] for index in indices))
        # A job may have come to others since.
        known = (
            *hosts,
            *(host for host in reaching.known if host not in hosts),
        )

        def again(
            where: Callable[[Job, Sequence[Host]], tuple[Host, ...]],
        ) -> tuple[Reaching, Job]:
            with closing(asker_of()) as asker:
                job = choose(
                    self.jobs(self.reach(hosts, reaching.access, asker)), state.job
                )
                found = where(job, known)
                spare = tuple(host for host in known if host not in found)
                return self.reach(found, reaching.access, asker, spare=spare), job

        left = Detached(
            state.job, tuple(host.name for host in hosts),
            attach=lambda: self.attach(*again(whereabouts), screen_for()),
            stop=lambda: self.stop(*again(known_whereabouts)).raise_unknown(),
        )  # fmt: skip
        notices = (*state.notices, str(left))
        screen.finish(replace(state, notices=notices, seen_unix_s=time.time()))
        return left

    def down(self) -> tuple[str, ...]:
        """End what hosts keep loaded for this kernel, and close all connections; return the hosts that it couldn't tell."""
        told = self._connections.end_templates()
        held = self.allocated
        warmed, self._warmed = self._warmed, {}  # a run may begin on another thread
        rest = [
            host
            for host in warmed
            if host.name not in told and (not host.allocation or host in held)
        ]
        ways = [warmed[host] for host in rest]
        with closing(NotebookAsker(can_ask=False)) as asker:
            untold = [
                name
                for name in in_parallel(partial(self._end_templates, asker), rest, ways)
                if name
            ]
        self._connections.close()
        self._allocations.end()
        return tuple(sorted(untold))

    def _end_templates(
        self, asker: NotebookAsker, host: Host, way: tuple[Access, str]
    ) -> str:
        """End what a host keeps loaded with which no conversation rests; return its name if that can't be."""
        access, python = way
        try:
            link = self._connections.link(
                host, replace(access, connect_timeout_s=_SOON_S), asker, python, build()
            )
            link.query(EndTemplates(owner=self.kernel), Templates)
            link.finish()
        except DistmagicError:
            return host.name
        return ""

    def close(self) -> None:
        """End what hosts keep loaded, where a conversation rests, and close all connections.

        Runs in the background end before. Allocations end too, but for those on which a detached job runs.
        """
        self.background.close()
        self._connections.close()
        self._allocations.leave()
        inside, self.inside = self.inside, None
        if inside is not None:
            inside.close()


def python_of(host: Host, access: Access) -> str:
    """Return the interpreter to start on a host: the one named, here the notebook's own, else `python3`."""
    return access.python_of(host.name) or (
        sys.executable if host.is_local else "python3"
    )


def fetch(run: Run, patterns: Sequence[str]) -> None:
    """Bring files of rank 0 to the current directory. A run that went well is not lost to a file that can't be had."""
    for pattern in patterns:
        try:
            paths = run.fetch(pattern)
        except DistmagicError as error:
            print(f"--fetch {pattern}: {error}", file=sys.stderr)  # noqa: T201 - a line for people
        else:
            names = sanitize.line(", ".join(map(str, paths)))  # a host has chosen them
            print(f"fetched {names}", file=sys.stderr)  # noqa: T201
