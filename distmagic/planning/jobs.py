"""Merges the lists of jobs that hosts send. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen

# Importing the wire's messages would take a third of the time allowed for %load_ext.
if TYPE_CHECKING:
    from distmagic.remote.wire.protocol import JobListing, JobTerms
    from distmagic.request.hosts import Host, Hosts


# Names that every machine has for itself.
_EACH_ONE_S_OWN = ("localhost", "127.0.0.1", "::1")


@frozen
class Job:
    """One job, running or ended, as far as the hosts that answered know it."""

    name: str
    hosts: tuple[str, ...]  # as its user named them, in the order of its nodes
    # For each node the index of the asked host that has it, -1 for none.
    host_indices: tuple[int, ...]
    running: tuple[int, ...]  # node ranks that run
    terms: JobTerms
    is_detached: bool  # whether it runs without a notebook
    reason: str  # how it ended
    size_bytes: int
    age_s: float  # how long it has run, by its hosts' clocks
    began_ago_s: float  # how long ago it started, by its hosts' clocks
    # A few values that one of its ranks reported last.
    metrics: Mapping[str, float] = field(default_factory=dict)
    protocols: tuple[int, ...] = ()  # protocol versions of its agents

    @property
    def is_running(self) -> bool:
        """Whether any of its nodes runs."""
        return bool(self.running)

    @property
    def ranks_name(self) -> str:
        """The name of its ranks that stay, "" for another job."""
        return self.terms.call.removeprefix("%%ranks ") if self.terms.stays else ""

    @property
    def grows(self) -> bool:
        """Whether hosts may join it: only the agent of its first node can admit them."""
        return self.is_running and self.terms.is_elastic and 0 in self.known

    @property
    def known(self) -> tuple[int, ...]:
        """The node ranks that a host has listed."""
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
        """running, detached, or how it ended: done, stopped, failed, interrupted, lease, ... or
        died.
        """
        if self.running:
            return "detached" if self.is_detached else "running"
        return self.reason or "died"


def found_jobs(
    asked: Sequence[str], answers: Iterable[Sequence[JobListing]]
) -> tuple[Job, ...]:
    """Return the jobs that hosts list, oldest first.

    `asked` are the hosts' names, `answers` has the list of each. Hosts that share a home list each
    other's nodes. So an entry only counts from the host with the node's own name, even if that host
    is down. If no asked host has that name, or it is one like localhost, any host may list the
    node.
    """
    told: dict[str, list[_Told]] = {}
    names = set(asked) - set(_EACH_ONE_S_OWN)
    for index, (name, listings) in enumerate(zip(asked, answers, strict=True)):
        for listing in listings:
            if 0 <= listing.node_rank < len(listing.hosts):
                of_host = listing.hosts[listing.node_rank]
                if of_host == name or of_host not in names:
                    told.setdefault(listing.job, []).append(_Told(index, name, listing))
    jobs = [_job(each) for each in told.values()]
    return tuple(sorted(jobs, key=lambda job: (-job.began_ago_s, job.name)))


@dataclass(frozen=True)
class _Told:
    """A host's entry for a node, with the host's index and the name under which it was asked."""

    index: int
    asked_as: str
    listing: JobListing


def _job(told: Sequence[_Told]) -> Job:
    def rank(one: _Told) -> tuple[bool, bool, bool]:
        hosts = one.listing.hosts
        is_own = one.asked_as == hosts[one.listing.node_rank]
        return is_own, one.asked_as not in hosts, one.listing.is_running

    # If several hosts list the same node, the most likely one; if equally likely, the first.
    believed: dict[int, _Told] = {}
    for one in sorted(told, key=rank, reverse=True):
        believed.setdefault(one.listing.node_rank, one)
    nodes = [believed[node].listing for node in sorted(believed)]
    first = nodes[0]
    # Hosts that joined later are at the end; the first node's list has all of them.
    hosts = max((one.hosts for one in nodes), key=len)
    host_indices = [-1] * len(hosts)
    for node, one in believed.items():
        host_indices[node] = one.index
    reasons = [one.reason for one in nodes if one.reason not in ("", "done")]
    reported = [one.reported for one in nodes if one.reported is not None]
    return Job(
        name=first.job,
        hosts=hosts,
        host_indices=tuple(host_indices),
        running=tuple(one.node_rank for one in nodes if one.is_running),
        terms=first.terms,
        is_detached=any(one.is_detached for one in nodes),
        reason=reasons[0] if reasons else first.reason,
        size_bytes=sum(one.size_bytes for one in nodes),
        age_s=max(one.age_s for one in nodes),
        began_ago_s=max(one.began_ago_s for one in nodes),
        metrics=reported[0].metrics if reported else {},
        protocols=tuple(sorted({one.protocol for one in nodes})),
    )


def check_orphans(
    jobs: Iterable[Job], owner: str, followed: Collection[str] = ()
) -> None:
    """Raise `UsageError` if an earlier job of this notebook still runs and waits for its notebook:
    it holds the devices.

    A job that the kernel is following now does not count: then the user wants two runs at once.
    """
    for job in jobs:
        is_own = job.terms.owner == owner and job.name not in followed
        if is_own and job.is_running and not job.is_detached:
            raise UsageError(
                f"Job {job.name}, which this notebook started, still runs on {', '.join(job.hosts)}.",
                f"%distributed attach {job.name} follows it, %distributed stop {job.name} ends it. "
                f"Otherwise the job ends by itself within {job.terms.lease_s:g} s.",
            )


def choose(jobs: Sequence[Job], name: str) -> Job:
    """Return the job with this name or with ranks of this name, or the only one whose name starts
    with it.

    Of ended jobs with ranks of this name, it is the newest. Raises `UsageError`.
    """
    fits = [job for job in jobs if job.name == name]
    if not fits and name:
        named = [job for job in jobs if job.ranks_name == name]
        fits = [job for job in named if job.is_running] or named[-1:]
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
    raise UsageError(
        f"{what}.", f"%distributed jobs lists them all; the latest: {known}."
    )


def whereabouts(job: Job, hosts: Sequence[Host]) -> Hosts:
    """Return the hosts of a job in the order of its nodes, chosen from the asked `hosts`.

    A host that is down and has not listed the job is found by its name. Raises `UsageError`.
    """
    asked = {host.name: host for host in hosts}
    unknown = [name for name in dict.fromkeys(job.missing) if name not in asked]
    if unknown:
        raise UsageError(
            f"Job {job.name} also ran on {', '.join(unknown)}, which is not among the hosts of this notebook.",
            "Name all of its hosts with %distributed hosts.",
        )
    found = []
    for index, name in zip(job.host_indices, job.hosts, strict=True):
        found.append(hosts[index] if index >= 0 else asked[name])
    return tuple(found)


def known_whereabouts(job: Job, hosts: Sequence[Host]) -> Hosts:
    """Return the hosts that have listed a job, in the order of `job.known`, chosen from the asked
    `hosts`.
    """
    return tuple(hosts[job.host_indices[node]] for node in job.known)
