"""One run from its start to its end, as two procedures for the run's own thread: `launch` a job, or
`attach` to one.

    reach hosts -> plan -> get their devices -> deliver -> start every node -> follow them
    -> sweep what lost agents left

Each step is a blocking action on a thread, for which the run loop waits. If only some hosts start,
they are stopped before the error is raised.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link import Link
from distmagic.connection.link_opener import LinkOpener
from distmagic.connection.parallel import begin_all, in_parallel
from distmagic.connection.requests import job_requests
from distmagic.errors import ConnectionLost, DistmagicError, UsageError
from distmagic.payload import blobs
from distmagic.payload.pack import Payload
from distmagic.planning import torchrun
from distmagic.planning.jobs import Job, check_orphans, found_jobs
from distmagic.planning.plan import Plan, terms_of
from distmagic.remote.frozen import frozen
from distmagic.remote.system import processes
from distmagic.remote.wire import protocol
from distmagic.remote.wire.protocol import JobTerms, WorkDir
from distmagic.render.screen import Screen
from distmagic.request.spec import JobSpec
from distmagic.runner import interrupts
from distmagic.runner.connect import claim_devices, connect, given_back
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.executor import Executor
from distmagic.runner.node_joiner import NodeJoiner
from distmagic.runner.node_row import Growth
from distmagic.runner.node_table import NodeTable
from distmagic.runner.prepare import other_python, prepare
from distmagic.runner.run_loop import Companion, RunLoop, new_clock
from distmagic.runner.start import start_all
from distmagic.state.decide import Limits
from distmagic.state.events import (
    Planned,
    Swept,
    Warned,
)
from distmagic.state.fold import begin
from distmagic.state.model import RunState

# How long the user waits for hosts with a lost agent: one that accepts SSH but does not answer
# would take a minute.
SWEEP_S = 15.0
# time for a host to come back, when the user looks at a job that has ended
_ENDED_S = 1.0


@frozen
class Followed:
    """How far a run was followed: to its end, or until it was detached.

    `host_indices` has for each node the index of its host in the fleet. `was_interrupted`: an
    interrupt came when the run was over.
    """

    state: RunState
    small_results: Mapping[tuple[int, int], bytes]
    host_indices: tuple[int, ...]
    was_interrupted: bool = False


def launch(  # noqa: PLR0913, PLR0917  # all that a run is made of
    first_links: FirstLinks, spec: JobSpec, payload: Payload, screen: Screen, job: str, owner: str, work: WorkDir,
    followed: Collection[str] = (), companion: Companion | None = None, variable: str = "run",
) -> Followed:  # fmt: skip
    """Run a job to its end; for a job to be detached, until it runs.

    `work` is its working directory. `owner` is the owner of the job. `followed` are the jobs that
    this kernel follows now, whose processes are no orphans. A `companion` takes part in its loop.
    `variable` is the name of the run's variable in messages.
    Raises a `HostError` before anything is started; for an interrupt before all nodes have started,
    `Cancelled`.
    """
    opener, fleet = first_links.opener, first_links.fleet
    lease_s = fleet.access.lease_s
    terms = terms_of(spec, lease_s=lease_s, owner=owner, call=payload.title)
    terms = replace(
        terms,
        can_type=screen.can_type() and not spec.detach,
        stays=companion is not None,
        ends_idle_s=None if companion is None else companion.ends_idle_s,
    )
    names = [host.name for host in fleet.hosts]
    state = first_state(job, names, spec, terms, variable)
    # Hosts that join later still need the blobs.
    with interrupts.noted() as noted, ExitStack() as in_use:
        in_use.enter_context(blobs.in_use(payload.blobs))
        loop = _new_loop(state, screen, opener, noted, companion)
        with loop.opening():
            enough = enough_hosts(spec, len(fleet.hosts))
            connected = connect(loop, first_links, enough, needs_remote=True)
            links = tuple(connected.values())
            with given_back(opener.connections, links):
                names = [link.host.name for link in links]
                running = [link.facts.running for link in links]
                check_orphans(found_jobs(names, running), owner, followed)
                payload = _readable_by(loop, links, payload)
                in_use.enter_context(blobs.in_use(payload.blobs))
                plan = _plan(loop, first_links, links, spec, job, terms, work)
                present = first_links.present
                links = claim_devices(loop, opener, present, links, spec, plan)
            payload = _announced(loop, spec, payload, links)
            lead = start_all(loop, opener.connections, plan, payload, links)
        growth, joiner = None, None
        if plan.terms.is_elastic:
            growth = Growth(host_names=fleet.names, awaited=tuple(first_links.absent))
            open_lead = partial(opener.link, present[0])
            joiner = NodeJoiner(
                job, open_lead, lead, payload.blobs, is_text=payload.in_source is None
            )
        table = NodeTable(present, lease_s, _new_id, growth)
        limits = Limits(
            timeout_s=spec.timeout_s,
            hang_timeout_s=spec.hang_timeout_s,
            away_s=lease_s,
        )
        nodes = dict(enumerate(links))
        executor = Executor(job, loop.queue, opener, lease_s, joiner)
        return _followed(
            loop, opener, table, executor, nodes, limits, detach=spec.detach
        )


def attach(
    first_links: FirstLinks,
    job: Job,
    screen: Screen,
    companion: Companion | None = None,
    variable: str = "run",
) -> Followed:
    """Follow a job from its first event to its end, as if this kernel had started it.

    `companion` and `variable` as for `launch`.

    `first_links` lead to the job's own hosts in the order of its nodes; those that are down are
    retried, as after a broken connection. An interrupt ends the job; for a detached job it only
    ends the following. Raises `UsageError` for a job of another distmagic version: its hosts would
    refuse to send its events, and it must not end because of that.
    """
    for number in job.protocols:
        if number != protocol.PROTOCOL:
            raise UsageError(f"{protocol.another_version(job.name, number)}.")
    opener, fleet = first_links.opener, first_links.fleet
    with interrupts.noted() as noted:
        loop = _new_loop(_state_of(job, variable), screen, opener, noted, companion)
        with loop.opening():
            links = connect(loop, first_links, enough=1)
        addresses = [""] * len(fleet.hosts)
        for node, link in links.items():
            addresses[node] = link.facts.address
        loop.note(Planned(addresses=tuple(addresses)))
        for why in first_links.absent.values():
            loop.note(Warned(text=f"{why} It is tried again."))
        growth, joiner = None, None
        if job.grows:
            # Hosts that were absent when the job started, and that are no node of it yet.
            awaited = [
                host_index
                for host_index, name in enumerate(fleet.names)
                if host_index >= len(fleet.hosts) and name in job.terms.awaited
            ]
            growth = Growth(host_names=fleet.names, awaited=awaited)
            joiner = NodeJoiner(job.name, partial(opener.link, 0))

        def follow(node: int) -> None:
            try:
                links[node].attach(protocol.FollowJob(job=job.name, node_rank=node))
            except ConnectionLost:
                links.pop(node).close()  # it is retried

        in_parallel(follow, tuple(links))

        # One host may be several nodes.
        host_indices = [fleet.hosts.index(host) for host in fleet.hosts]
        patience_s = job.terms.lease_s if job.is_running else _ENDED_S
        table = NodeTable(host_indices, patience_s, _new_id, growth)
        executor = Executor(job.name, loop.queue, opener, patience_s, joiner)
        limits = Limits(
            hang_timeout_s=job.terms.hang_timeout_s,
            away_s=patience_s if job.is_running else None,
        )
        return _followed(loop, opener, table, executor, links, limits)


def first_state(
    job: str, names: Sequence[str], spec: JobSpec, terms: JobTerms, variable: str
) -> RunState:
    """Return the first state of a run that starts now, on hosts with these names."""
    return replace(
        begin(job, names, terms),
        name=spec.name or "",
        variable=variable,
        began_unix_s=time.time(),
        began_up_s=processes.up_s(),
    )


def _state_of(job: Job, variable: str) -> RunState:
    """Return the first state of a job that this kernel has not started, or has left."""
    return replace(
        begin(job.name, job.hosts, job.terms),
        variable=variable,
        before_s=job.age_s,
        began_unix_s=time.time() - job.began_ago_s,
        began_up_s=processes.up_s() - job.began_ago_s,
        # Known from the start: an interrupt before its events arrive must not end it.
        detached_by="asked" if job.is_detached else "",
    )


def _new_loop(
    state: RunState,
    screen: Screen,
    opener: LinkOpener,
    noted: interrupts.Interrupts,
    companion: Companion | None,
) -> RunLoop:
    clock = new_clock()
    queue = EventQueue(clock)
    return RunLoop(
        state, queue, screen, opener.asker.serve, noted, clock, _new_id, companion
    )


def _readable_by(loop: RunLoop, links: Sequence[Link], payload: Payload) -> Payload:
    """Return a payload that all hosts can read: if one has another Python version, byte code is
    replaced by source.
    """
    other = other_python(links)
    if other is None or payload.in_source is None:
        return payload
    (packing,) = begin_all("pack", payload.in_source, [other])
    packed = loop.result(packing)
    return replace(
        payload,
        call=packed.call,
        code=packed.code,
        side_files=packed.side_files,
        in_source=None,
    )


def _announced(
    loop: RunLoop, spec: JobSpec, payload: Payload, links: Sequence[Link]
) -> Payload:
    """Return the payload with the settings that its ranks get, and show these and its notice."""
    if spec.no_settings:
        payload = replace(payload, settings=("", ""))
    elif words := payload.settings[1]:
        text = f"The ranks start with this process's settings: {words}. With --no-settings they don't."
        loop.note(Warned(text=text))
    if payload.notice:
        loop.note(Warned(text=payload.notice))
    if payload.device and any(link.facts.gpus for link in links):
        text = f"{payload.device}, as chosen in the notebook, and the hosts have GPUs. To use them, choose it in the function."
        loop.note(Warned(text=text))
    return payload


def _followed(
    loop: RunLoop,
    opener: LinkOpener,
    table: NodeTable,
    executor: Executor,
    links: Mapping[int, Link],
    limits: Limits,
    *,
    detach: bool = False,
) -> Followed:
    """Follow all nodes, end what lost agents have left, and return how far that went."""
    try:
        loop.follow(table, executor, links, limits, detach=detach)
        _sweep(loop, opener, table)
    finally:
        executor.close(table.links)
    # While interrupts are still counted: an interrupt now must not lose the run's value.
    loop.finish()
    return Followed(
        state=loop.state,
        small_results=table.small_results,
        host_indices=tuple(row.host_index for row in table.rows),
        was_interrupted=loop.interrupts.take(),
    )


def _new_id() -> str:
    return secrets.token_hex(8)


def enough_hosts(spec: JobSpec, count: int) -> int | None:
    """Return with how many of `count` hosts an elastic job starts; None means it needs all of them.

    It needs all if there are more hosts than its maximum, or if the user has named the first host's
    address.
    """
    if (
        spec.nnodes is None
        or not spec.is_elastic
        or spec.rdzv_endpoint
        or spec.local_addr
    ):
        return None
    low, high = spec.nnodes
    return low if count <= high else None


def _plan(
    loop: RunLoop,
    first_links: FirstLinks,
    links: Sequence[Link],
    spec: JobSpec,
    job: str,
    terms: JobTerms,
    work: WorkDir,
) -> Plan:
    """Return the plan, and show its warnings."""
    fleet = first_links.fleet
    awaited = tuple(fleet.names[host_index] for host_index in first_links.absent)
    terms = replace(terms, awaited=awaited)
    (preparing,) = begin_all(
        "prepare", prepare, [links], [spec], [job], [terms], [work]
    )
    plan, warnings = loop.result(preparing)
    nproc = [node.nproc_per_node for node in plan.nodes]
    planned = Planned(
        addresses=tuple(node.address for node in plan.nodes),
        terms=plan.terms,
        present=first_links.present,
        world_size=torchrun.world_size(plan.rdzv, nproc),
        chose_port=plan.chose_port,
    )
    loop.note(planned)
    for why in first_links.absent.values():
        loop.note(Warned(text=f"{why} The run starts without this host."))
    loop.note(*(Warned(text=text) for text in warnings))
    return plan


def _sweep(loop: RunLoop, opener: LinkOpener, table: NodeTable) -> None:
    """End what is left on nodes with a lost agent, as far as they can be reached; wait at most
    `SWEEP_S`.

    A node that only this notebook has lost may run on: an agent of a detached job is only ended by
    a stop.
    """
    state = loop.state
    job = state.job
    ends_agents = bool(state.stopping) or not (
        state.detached_by or state.terms.goes_on_alone
    )
    lost = [
        node_rank
        for node_rank in state.lost
        if ends_agents or table.rows[node_rank].is_agent_gone
    ]
    if not lost or not state.is_over:
        return

    def sweep(node_rank: int) -> None:
        row = table.rows[node_rank]
        try:
            with closing(opener.link(row.host_index, broken=row.link)) as link:
                survivors = job_requests.sweep(link, job, node_rank).survivors
                link.finish()
        except DistmagicError:
            # Out of reach: its own lease ends it, and the run's error reports it.
            return
        loop.queue.tell(Swept(survivors=survivors), node_rank=node_rank)

    try:
        loop.wait_for(begin_all("sweep", sweep, lost), SWEEP_S)
    except KeyboardInterrupt:
        return  # the rest ends with its lease
