"""A kernel's session with its hosts: runs jobs there, follows those that were started before, and keeps hosts warm."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial

from distmagic.connection.link import Link
from distmagic.connection.prompts import NotebookAsker, asker_of
from distmagic.connection.reach import Connections, Reaching, connect
from distmagic.errors import Cancelled, DistmagicError, SpecError
from distmagic.payload.bundle import build
from distmagic.payload.pack import Payload
from distmagic.planning import plan as planning
from distmagic.planning.jobs import Job, check_orphans, choose, found_jobs, known_whereabouts, whereabouts
from distmagic.planning.plan import Plan
from distmagic.remote.wire.protocol import EndTemplates, Templates
from distmagic.request.hosts import LOCALHOST, Host
from distmagic.request.spec import Access, JobSpec
from distmagic.runner import interrupts
from distmagic.runner.drive import Limits, Screen, drive
from distmagic.runner.elastic_join import NOWHERE, Intake
from distmagic.runner.launch import Launch
from distmagic.runner.opening import Opening
from distmagic.runner.outcome import Detached, Run
from distmagic.runner.prepare import in_parallel, prepare
from distmagic.runner.rollback import sweep_lost
from distmagic.screens.choose import screen_for
from distmagic.session.housekeeping import Housekeeping
from distmagic.state.events import Planned, Warned
from distmagic.state.fold import begin, fold
from distmagic.state.model import RunState
from distmagic.state.verdict import verdict

_SOON_S = 3.0  # to connect to a host that only has to be told to end something
_ENDED_S = 1.0  # for a host that is down to come back, when a job is looked at that has ended


class Session(Housekeeping):
    """What a kernel keeps between runs: its open connections, and what hosts keep loaded for it (by `kernel`)."""

    def __init__(self) -> None:
        self._connections = Connections(connect)
        self.kernel = secrets.token_hex(6)
        self._warmed: dict[Host, tuple[Access, str]] = {}  # hosts that were asked to keep something loaded

    def reach(
        self, hosts: tuple[Host, ...], access: Access, asker: NotebookAsker, spec: JobSpec | None = None,
        spare: tuple[Host, ...] = (),
    ) -> Reaching:  # fmt: skip
        """Begin to reach hosts, in the background; no host means this machine. `spec` is the run that is to come.

        Of `spare` hosts only the names are needed for now: they may come to a job that is followed.
        """
        hosts = hosts or (LOCALHOST,)
        pythons = tuple(python_of(host, access) for host in (*hosts, *spare))

        def open_link(host: Host, python: str) -> Link:
            link = self._connections.rested(host, access, asker, python, build())
            link.warm = planning.warming(spec, access, host, link.facts, self.kernel) if spec else None
            if link.warm is not None:
                link.kept = link.warm
                self._warmed[host] = access, python
                link.send(link.warm)  # no answer: where that can't be, the job starts without it
            return link

        return Reaching(hosts, access, asker, self._connections, pythons, open_link, spare)

    def dry_run(self, reaching: Reaching, spec: JobSpec) -> str:
        """Return the commands that a run would start on every host, having started nothing."""
        links = reaching.wait(enough=_enough(spec, reaching))
        try:
            plan, _ = prepare(links, spec, _new_job(), lease_s=reaching.access.lease_s, owner=owner())
            return planning.commands(plan, [link.facts.executable for link in links])
        finally:
            in_parallel(reaching.rest, reaching.present, links)

    def launch(self, reaching: Reaching, spec: JobSpec, payload: Payload, screen: Screen) -> Run | Detached:
        """Run a job to its end and return what is left of it; one that is to be detached only until it has begun.

        Raises a `HostError` before anything is started, or a `RunError` that carries the `Run`; for an interrupt at any
        time, `Cancelled`.
        """
        began, job = time.monotonic(), _new_job()
        state = begin(job, [host.name for host in reaching.hosts], spec.max_restarts)
        with interrupts.noted() as noted:
            opening = _opening(state, began, reaching, screen, noted)
            with opening.guarded():
                links = reaching.wait(opening.watch_hosts, _enough(spec, reaching))
                plan = self._prepare(opening, links, spec, job, reaching)
                launch = self._launch(
                    job, dict(enumerate(links)), reaching.present, reaching, reaching.access.lease_s, began
                )
                if plan.terms.is_elastic:
                    launch.take_in(self._intake(reaching, launch, tuple(reaching.absent)))
                try:
                    launch.start(plan, payload, partial(opening.watch, events=partial(launch.batch, 0.0)))
                except BaseException:
                    launch.close()
                    raise
            with closing(launch):
                limits = Limits(timeout_s=spec.timeout_s, hang_timeout_s=spec.hang_timeout_s)
                serve = reaching.asker.serve
                state = drive(launch, opening.state, screen, serve, limits, noted, detach=spec.detach)
            return self._finish(state, launch, reaching, screen, noted)

    def _prepare(self, opening: Opening, links: Sequence[Link], spec: JobSpec, job: str, reaching: Reaching) -> Plan:
        """Return the plan, and tell its warnings. Where there is none, the links are closed."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="distmagic-prepare")
        try:
            check_orphans(found_jobs([link.facts.running for link in links]), owner())
            awaited = tuple(reaching.hosts[place].name for place in reaching.absent)
            lease_s = reaching.access.lease_s
            plan, warnings = opening.result(
                pool.submit(prepare, links, spec, job, lease_s=lease_s, owner=owner(), awaited=awaited)
            )
        except BaseException:
            in_parallel(Link.close, links)
            raise
        finally:
            pool.shutdown(wait=False)
        addresses = tuple(node.address for node in plan.nodes)
        planned = Planned(addresses=addresses, min_nodes=plan.terms.min_nodes, present=reaching.present)
        absent = [f"{why} The run begins without this host." for why in reaching.absent.values()]
        opening.tell(planned, *(Warned(text=text) for text in (*absent, *warnings)))
        return plan

    def _launch(
        self, job: str, links: Mapping[int, Link], places: Sequence[int], reaching: Reaching, lease_s: float,
        began: float,
    ) -> Launch:  # fmt: skip
        reopen = partial(self._reopen, reaching)
        launch = Launch(job, links, places, lease_s, reopen, began)
        launch.rest = reaching.rest
        return launch

    def _intake(self, reaching: Reaching, launch: Launch, awaited: tuple[int, ...]) -> Intake:
        names = [host.name for host in reaching.known]
        return Intake(
            open_lead=lambda: self._link(reaching, launch.host_of(0)),
            place_of=lambda name: names.index(name) if name in names else NOWHERE,
            awaited=awaited,
        )

    # ---- jobs that were started before, also by other kernels

    def attach(self, reaching: Reaching, job: Job, screen: Screen) -> Run | Detached:
        """Follow a job from its first event to its end, as if this kernel had started it.

        An interrupt ends it; of a detached job it only ends the following.

        `reaching` are the job's own hosts in the order of its nodes; those that are down are tried again and again, as
        when a connection breaks. Raises what `launch` raises for a run.
        """
        began = time.monotonic()
        state = replace(begin(job.name, job.hosts, job.terms.max_restarts), before_s=job.age_s)
        with interrupts.noted() as noted:
            opening = _opening(state, began, reaching, screen, noted)
            with opening.guarded():
                there = reaching.wait(opening.watch_hosts, enough=1)
            links = dict(zip(reaching.present, there, strict=True))
            nodes = range(len(reaching.hosts))
            places = [reaching.hosts.index(host) for host in reaching.hosts]  # it may have been several nodes
            addresses = tuple(links[node].facts.address if node in links else "" for node in nodes)
            missed = [f"{why} It is tried again." for why in reaching.absent.values()]
            opening.tell(
                Planned(addresses=addresses, min_nodes=job.terms.min_nodes), *(Warned(text=text) for text in missed)
            )
            patience_s = job.terms.lease_s if job.is_running else _ENDED_S
            with closing(self._launch(job.name, links, places, reaching, patience_s, began)) as launch:
                if job.grows:
                    awaited = [
                        n for n, host in enumerate(reaching.known) if n >= len(nodes) and host.name in job.terms.awaited
                    ]
                    launch.take_in(self._intake(reaching, launch, tuple(awaited)))
                launch.attach()
                limits = Limits(hang_timeout_s=job.terms.hang_timeout_s)
                state = drive(launch, opening.state, screen, reaching.asker.serve, limits, noted)
            return self._finish(state, launch, reaching, screen, noted)

    # ---- the end of a run

    def _finish(
        self, state: RunState, launch: Launch, reaching: Reaching, screen: Screen, noted: interrupts.Interrupts
    ) -> Run | Detached:
        if not state.is_over:
            return self._leave(state, launch, reaching, screen)

        def open_link(node_rank: int) -> Link:
            return self._link(reaching, launch.host_of(node_rank))

        def reopen(node_rank: int) -> Link:
            return self._reopen(reaching, launch.host_of(node_rank))

        state = fold(state, sweep_lost(state, reopen, noted, reaching.asker.serve))
        screen.finish(state)

        error = verdict(state)
        if error is None and noted.take():
            error = Cancelled("Interrupted when the run was over: every rank had ended well.")
        small = {rank: launch.small_results.get((w.node_rank, rank)) for rank, w in state.workers.items()}
        known = {rank: data for rank, data in small.items() if data is not None}
        run = Run(state, known, open_link, shown=error is None)
        if error is not None:
            error.run = run
            raise error
        return run

    def _leave(self, state: RunState, launch: Launch, reaching: Reaching, screen: Screen) -> Detached:
        """Let a detached job go on, and return what finds it again."""
        hosts = tuple(dict.fromkeys(reaching.known[place] for place in launch.places if place != NOWHERE))
        known = (*hosts, *(host for host in reaching.known if host not in hosts))  # a job may have come to others since

        def again(where: Callable[[Job, Sequence[Host]], tuple[Host, ...]]) -> tuple[Reaching, Job]:
            with closing(asker_of()) as asker:
                job = choose(self.jobs(self.reach(hosts, reaching.access, asker)), state.job)
                found = where(job, known)
                spare = tuple(host for host in known if host not in found)
                return self.reach(found, reaching.access, asker, spare=spare), job

        left = Detached(
            state.job, tuple(host.name for host in hosts),
            attach=lambda: self.attach(*again(whereabouts), screen_for()),
            stop=lambda: self.stop(*again(known_whereabouts)),
        )  # fmt: skip
        screen.finish(replace(state, notices=(*state.notices, str(left))))
        return left

    def _link(self, reaching: Reaching, place: int) -> Link:
        if place == NOWHERE:
            raise SpecError(
                "That host is not among the hosts of this notebook.",
                "Name all hosts of the job with %distributed hosts.",
            )
        host, python = reaching.known[place], reaching.pythons[place]
        return self._connections.link(host, reaching.access, reaching.asker, python, build())

    def _reopen(self, reaching: Reaching, place: int) -> Link:
        """Return a conversation over a new connection: the old one is broken, whatever it says of itself."""
        if place != NOWHERE:
            self._connections.drop(reaching.known[place], reaching.access)
        return self._link(reaching, place)

    def down(self) -> tuple[str, ...]:
        """End what hosts keep loaded for this kernel, and close all connections; return the hosts that it couldn't tell."""
        told = self._connections.cool()
        rest = [host for host in self._warmed if host.name not in told]
        with closing(NotebookAsker(can_ask=False)) as asker:
            untold = [name for name in in_parallel(partial(self._cool, asker), rest) if name]
        self._warmed = {}
        self.close()
        return tuple(sorted(untold))

    def _cool(self, asker: NotebookAsker, host: Host) -> str:
        """End what a host keeps loaded with which no conversation rests; return its name if that can't be."""
        access, python = self._warmed[host]
        try:
            link = self._connections.link(host, replace(access, connect_timeout_s=_SOON_S), asker, python, build())
            link.query(EndTemplates(owner=self.kernel), Templates)
            link.finish()
        except DistmagicError:
            return host.name
        return ""

    def close(self) -> None:
        """End what hosts keep loaded, where a conversation rests, and close all connections."""
        self._connections.close()


def _opening(
    state: RunState, began: float, reaching: Reaching, screen: Screen, noted: interrupts.Interrupts
) -> Opening:
    return Opening(state, screen, lambda: time.monotonic() - began, reaching.asker.serve, noted)


def _enough(spec: JobSpec, reaching: Reaching) -> int | None:
    """Return with how many hosts an elastic job begins; None: it needs them all.

    Of more hosts than its maximum it can't leave out any; nor where the user has said what the first one's address is.
    """
    if spec.nnodes is None or not spec.is_elastic or spec.rdzv_endpoint or spec.local_addr:
        return None
    low, high = spec.nnodes
    return low if len(reaching.hosts) <= high else None


def python_of(host: Host, access: Access) -> str:
    """Return the interpreter to start on a host: the one named, here the notebook's own, else `python3`."""
    return access.python_of(host.name) or (sys.executable if host.is_local else "python3")


def owner() -> str:
    """Return the name of the notebook that this kernel belongs to, "" where Jupyter doesn't tell."""
    path = os.environ.get("JPY_SESSION_NAME", "")
    return f"{socket.gethostname()}:{path}" if path else ""


def _new_job() -> str:
    return time.strftime("%m%d-%H%M%S-") + secrets.token_hex(4)
