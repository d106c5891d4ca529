"""Jobs as they are found on hosts: what each host lists, put together. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distmagic.errors import SpecError

# The wire's messages take a third of the time that %load_ext may take.
if TYPE_CHECKING:
    from distmagic.remote.wire.protocol import JobListing, JobTerms
    from distmagic.request.hosts import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job, running or ended, as far as the hosts that were asked know of it.

    `hosts` are its hosts in the order of its nodes, under the names that its user gave them. `host_indices` says for each
    node which of the asked hosts has it, as an index; -1 for none. `running` are the node ranks that run. `began_s` is
    in seconds since 1970 by its hosts' clocks. `reason` is how it ended. `is_detached`: it needs no notebook. `age_s` is
    how long it has run, or ran. `metrics` are a few values that one of its ranks has reported last. `protocols` are those
    that its agents speak.
    """

    name: str
    hosts: tuple[str, ...]
    host_indices: tuple[int, ...]
    running: tuple[int, ...]
    began_s: float
    terms: JobTerms
    is_detached: bool
    reason: str
    size_bytes: int
    age_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    protocols: tuple[int, ...] = ()

    @property
    def is_running(self) -> bool:
        """Whether any of its nodes runs."""
        return bool(self.running)

    @property
    def grows(self) -> bool:
        """Whether hosts may come (back) to it: only the agent of its first node can take them in."""
        return self.is_running and self.terms.is_elastic and 0 in self.known

    @property
    def known(self) -> tuple[int, ...]:
        """The node ranks that a host has told of."""
        return tuple(node for node, index in enumerate(self.host_indices) if index >= 0)

    @property
    def missing(self) -> tuple[str, ...]:
        """The hosts of the other nodes."""
        return tuple(
            name
            for name, index in zip(self.hosts, self.host_indices, strict=True)
            if index < 0
        )

    @property
    def phase(self) -> str:
        """running, detached, or how it ended: done, stopped, failed, interrupted, lease, ... or died."""
        if self.running:
            return "detached" if self.is_detached else "running"
        return self.reason or "died"


def found_jobs(answers: Iterable[Sequence[JobListing]]) -> tuple[Job, ...]:
    """Return the jobs that hosts list, the oldest first. `answers` is what each of the asked hosts lists, in order."""
    nodes: dict[str, dict[int, tuple[int, JobListing]]] = {}
    for index, listed in enumerate(answers):
        for one in listed:
            table = nodes.setdefault(one.job, {})
            known = table.get(one.node_rank)
            # Hosts with one name and one home list each other's nodes, and each sees only its own run.
            if known is None or (one.is_running and not known[1].is_running):
                table[one.node_rank] = (index, one)
    jobs = [_job(name, table) for name, table in nodes.items()]
    return tuple(sorted(jobs, key=lambda job: (job.began_s, job.name)))


def _job(name: str, found: dict[int, tuple[int, JobListing]]) -> Job:
    nodes = {node_rank: one for node_rank, (_, one) in found.items()}
    first = nodes[min(nodes)]
    # A node that came back later knows of one more.
    hosts = max((one.hosts for one in nodes.values()), key=len)
    host_indices = [-1] * len(hosts)
    running = []
    for rank, (index, one) in sorted(found.items()):
        if 0 <= rank < len(hosts):
            host_indices[rank] = index
            if one.is_running:
                running.append(rank)
    reasons = [one.reason for one in nodes.values() if one.reason not in ("", "done")]
    reported = [one.reported for one in nodes.values() if one.reported is not None]
    return Job(
        name=name,
        hosts=hosts,
        host_indices=tuple(host_indices),
        running=tuple(running),
        began_s=first.began_s,
        terms=first.terms,
        is_detached=any(one.is_detached for one in nodes.values()),
        reason=reasons[0] if reasons else first.reason,
        size_bytes=sum(one.size_bytes for one in nodes.values()),
        age_s=max(one.age_s for one in nodes.values()),
        metrics=reported[0].metrics if reported else {},
        protocols=tuple(sorted({one.protocol for one in nodes.values()})),
    )


def check_orphans(
    jobs: Iterable[Job], owner: str, followed: Collection[str] = ()
) -> None:
    """Raise `SpecError` if a job of this very notebook still runs there and waits for it: it holds the devices.

    Not if the notebook's kernel follows that job just now: then two runs at once are what the user wants.
    """
    for job in jobs:
        is_own = job.terms.owner == owner and job.name not in followed
        if is_own and job.is_running and not job.is_detached:
            raise SpecError(
                f"Job {job.name}, which this notebook began, still runs on {', '.join(job.hosts)}.",
                f"%distributed attach {job.name} follows it, %distributed stop {job.name} ends it. "
                f"Without either it ends by itself within {job.terms.lease_s:g} s.",
            )


def choose(jobs: Sequence[Job], name: str) -> Job:
    """Return the job of this name, or the only one whose name begins so. Raises `SpecError`."""
    fits = [job for job in jobs if job.name == name]
    if not fits and name:
        fits = [job for job in jobs if job.name.startswith(name)]
    if len(fits) == 1:
        return fits[0]
    latest = (fits or jobs)[-5:]
    known = ", ".join(job.name for job in latest) or "none"
    what = (
        f"{name!r} fits several jobs"
        if fits
        else f"There is no job {name!r} on these hosts"
    )
    raise SpecError(
        f"{what}.", f"%distributed jobs lists them all; the latest: {known}."
    )


def whereabouts(job: Job, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts of a job in the order of its nodes, out of `hosts`, which were asked. Raises `SpecError`.

    A host that has not told of it, being down, is found by its name.
    """
    asked = {host.name: host for host in hosts}
    unknown = [name for name in dict.fromkeys(job.missing) if name not in asked]
    if unknown:
        raise SpecError(
            f"Job {job.name} also ran on {', '.join(unknown)}, which is not among the hosts of this notebook.",
            "Name all of its hosts with %distributed hosts.",
        )
    found = []
    for index, name in zip(job.host_indices, job.hosts, strict=True):
        found.append(hosts[index] if index >= 0 else asked[name])
    return tuple(found)


def known_whereabouts(job: Job, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return those hosts of a job that have told of it, in the order of `job.known`, out of `hosts`, which were asked."""
    return tuple(hosts[job.host_indices[node]] for node in job.known)
