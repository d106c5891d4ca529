"""A kernel's session: runs jobs on hosts, follows jobs that were started before, and keeps
processes on hosts warm.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

from distmagic import sanitize
from distmagic.comparison.compare import RunHistory
from distmagic.connection.connections import Connections, connect
from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link import Link
from distmagic.connection.link_opener import UNKNOWN_HOST, Fleet, LinkOpener
from distmagic.connection.prompts import NotebookAsker, asker_of
from distmagic.connection.warm_hosts import WarmHosts
from distmagic.diagnosis.as_text import in_words
from distmagic.diagnosis.finding import MEMORY, NCCL
from distmagic.names import new_job, owner, work_dir
from distmagic.outcome.detached import Detached
from distmagic.outcome.post_mortem import FailedRuns
from distmagic.outcome.run import left
from distmagic.outcome.shown import shell
from distmagic.payload.pack import Payload
from distmagic.planning.jobs import Job, choose, known_whereabouts, whereabouts
from distmagic.remote.frozen import frozen
from distmagic.render.screen import Screen
from distmagic.request.access import Access
from distmagic.request.hosts import LOCALHOST, Host, Hosts
from distmagic.request.spec import JobSpec
from distmagic.runner.launch import Followed, attach, launch
from distmagic.runner.run_loop import Companion
from distmagic.screens.choose import screen_for
from distmagic.session import doctor
from distmagic.session.allocations import Allocations
from distmagic.session.background import BackgroundRuns, Left
from distmagic.session.housekeeping import Housekeeping
from distmagic.session.inside import Inside
from distmagic.session.local_hints import error_of
from distmagic.state.model import RunState
from distmagic.state.verdict import may_be_of_hosts
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


# ---- the end of a run


def left_of(
    session: Session, followed: Followed, opener: LinkOpener, screen: Screen
) -> Left:
    """Return the `Run` of a finished run; the `Detached` of a job that runs on.

    Raises the error of a failed run; its attribute `run` is the `Run`.
    """
    state = followed.state
    if not state.is_over:
        return _leave(session, followed, opener.fleet, screen)

    session.history.add(state)
    error = error_of(state, was_interrupted=followed.was_interrupted)
    if error is not None:
        if may_be_of_hosts(state, error):
            error.hint = f"{error.hint}\n{diagnosed(session, state, opener.fleet)}"
            error.hint = sanitize.lines(error.hint.strip())
        session.allocations.advise(opener.fleet.hosts, error)
    small_results = {}
    for rank, worker in state.workers.items():
        data = followed.small_results.get((worker.node_rank, rank))
        if data is not None:
            small_results[rank] = data
    first = session.failed_runs.add(state, small_results)
    is_cause = first is not None and state.first_failure in (None, first)
    can_debug = shell() is not None and screen.can_type()
    if error is not None and is_cause and can_debug:
        offer = f"%distributed debug {state.job} opens pdb where rank {first} failed."
        error.hint = f"{error.hint}\n{offer}".strip()
    host_indices = followed.host_indices

    def open_link(node_rank: int) -> Link:
        return opener.link_again(host_indices[node_rank])

    try:
        return left(state, small_results, open_link, error)
    finally:
        # The error's traceback refers to this frame: a reference cycle would keep both, and the
        # run, alive
        del error


def diagnosed(session: Session, state: RunState, fleet: Fleet) -> str:
    """Return the doctor's findings on the hosts of a failed run; "" if there are none, or if
    the doctor fails.
    """
    seconds = min(fleet.access.connect_timeout_s, doctor.CONNECT_S)
    access = replace(fleet.access, connect_timeout_s=seconds)
    port = 0
    for reason in () if state.chose_port else state.unreached.values():
        port = doctor.port_in(reason)
    with closing(NotebookAsker(can_ask=False)) as asker:
        try:
            # First: it may fail, and nothing closes connections then.
            reported = session.allocations.findings(fleet.hosts, asker)
            first_links = session.reach(fleet.hosts, access, asker)
            found = doctor.examine(first_links, port=port, reported=reported)
        except (Exception, KeyboardInterrupt):  # noqa: BLE001
            return ""  # the run's own error is raised, whatever fails here
    # The memory of GPUs stops no network, and NCCL reports of a job that still runs: both are
    # of other runs of the same user.
    causes = [
        one
        for one in found.findings
        if not one.check.startswith(MEMORY) and one.check != NCCL
    ]
    return in_words(causes)


def _leave(
    session: Session, followed: Followed, fleet: Fleet, screen: Screen
) -> Detached:
    """Stop following a detached job, which runs on; return the object that attaches to it or
    stops it.
    """
    state = followed.state
    hosts = []
    for index in dict.fromkeys(followed.host_indices):
        if index != UNKNOWN_HOST and fleet.known[index] not in hosts:
            hosts.append(fleet.known[index])
    # An elastic job may have moved to other hosts since.
    spare = [host for host in fleet.known if host not in hosts]
    fleet = Fleet(hosts=tuple(hosts), access=fleet.access, spare=tuple(spare))
    again = JobHandle(session=session, job=state.job, fleet=fleet)
    names = tuple(host.name for host in hosts)
    alone = Detached(state.job, names, attach=again.attach, stop=again.stop)
    notices = (*state.notices, str(alone))
    screen.finish(replace(state, notices=notices, seen_unix_s=time.time()))
    return alone


@frozen
class JobHandle:
    """A detached job, which runs on.

    It is found on the hosts of `fleet`; it may have moved to the spare hosts.
    """

    session: Session
    job: str
    fleet: Fleet

    def attach(self) -> Left:
        """Follow the job to its end, as `Session.attach`."""
        with closing(asker_of()) as asker:
            found = self._find(whereabouts, asker)
            return self.session.attach(*found, screen_for())

    def stop(self) -> None:
        """End the job. Raises the error of a host that has not confirmed its end."""
        with closing(asker_of()) as asker:
            found = self._find(known_whereabouts, asker)
            self.session.housekeeping.stop(*found).raise_unknown()

    def _find(
        self,
        where: Callable[[Job, Sequence[Host]], Hosts],
        asker: NotebookAsker,
    ) -> tuple[FirstLinks, Job]:
        known, access = self.fleet.known, self.fleet.access
        asked = self.session.reach(self.fleet.hosts, access, asker)
        job = choose(self.session.housekeeping.jobs(asked), self.job)
        hosts = where(job, known)
        spare = tuple(host for host in known if host not in hosts)
        return self.session.reach(hosts, access, asker, spare=spare), job
