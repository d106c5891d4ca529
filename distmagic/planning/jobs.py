"""Jobs as they are found on hosts: what each host lists, put together. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distmagic.errors import UsageError

# The wire's messages take a third of the time that %load_ext may take.
if TYPE_CHECKING:
    from distmagic.remote.wire.protocol import JobListing, JobTerms
    from distmagic.request.hosts import Host


_EACH_ONE_S_OWN = (
    "localhost",
    "127.0.0.1",
    "::1",
)  # names that every machine has for itself


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, running or ended, as far as the hosts that were asked know of it.

    `hosts` are its hosts in the order of its nodes, under the names that its user gave them. `host_indices` says for each
    node which of the asked hosts has it, as an index; -1 for none. `running` are the node ranks that run. `reason` is
    how it ended. `is_detached`: it needs no notebook. `age_s` is how long it has run, or ran, and `began_ago_s` how long
    ago it began, each by its hosts' own clocks. `metrics` are a few values that one of its ranks has reported last. `protocols` are those
    that its agents speak.
    """

    name: str
    hosts: tuple[str, ...]
    host_indices: tuple[int, ...]
    running: tuple[int, ...]
    terms: JobTerms
    is_detached: bool
    reason: str
    size_bytes: int
    age_s: float
    began_ago_s: float
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


def found_jobs(
    asked: Sequence[str], answers: Iterable[Sequence[JobListing]]
) -> tuple[Job, ...]:
    """Return the jobs that hosts list, the oldest first. `asked` are their names here, `answers` what each of them lists.

    Hosts that share a home list each other's nodes. So a listing counts only from the host that was asked under the
    node's own name, even if that one is down. Every machine calls itself localhost, and a host may have another name
    here: then any may list the node.
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
    """What a host, by its index and the name under which it was asked, lists of a node."""

    index: int
    asked_as: str
    listing: JobListing


def _job(told: Sequence[_Told]) -> Job:
    def rank(one: _Told) -> tuple[bool, bool, bool]:
        hosts = one.listing.hosts
        is_own = one.asked_as == hosts[one.listing.node_rank]
        return is_own, one.asked_as not in hosts, one.listing.is_running

    # Of several that list the same node the likeliest, of several alike the first.
    believed: dict[int, _Told] = {}
    for one in sorted(told, key=rank, reverse=True):
        believed.setdefault(one.listing.node_rank, one)
    nodes = {node: believed[node].listing for node in sorted(believed)}
    first = nodes[min(nodes)]
    # Hosts that joined later are at the end; the first node knows of all.
    hosts = max((one.hosts for one in nodes.values()), key=len)
    host_indices = [-1] * len(hosts)
    for node, one in believed.items():
        host_indices[node] = one.index
    running = [node for node, listing in nodes.items() if listing.is_running]
    reasons = [one.reason for one in nodes.values() if one.reason not in ("", "done")]
    reported = [one.reported for one in nodes.values() if one.reported is not None]
    return Job(
        name=first.job,
        hosts=hosts,
        host_indices=tuple(host_indices),
        running=tuple(running),
        terms=first.terms,
        is_detached=any(one.is_detached for one in nodes.values()),
        reason=reasons[0] if reasons else first.reason,
        size_bytes=sum(one.size_bytes for one in nodes.values()),
        age_s=max(one.age_s for one in nodes.values()),
        began_ago_s=max(one.began_ago_s for one in nodes.values()),
        metrics=reported[0].metrics if reported else {},
        protocols=tuple(sorted({one.protocol for one in nodes.values()})),
    )


def check_orphans(
    jobs: Iterable[Job], owner: str, followed: Collection[str] = ()
) -> None:
    """Raise `UsageError` if a job of this very notebook still runs there and waits for it: it holds the devices.

    Not if the notebook's kernel follows that job just now: then two runs at once are what the user wants.
    """
    for job in jobs:
        is_own = job.terms.owner == owner and job.name not in followed
        if is_own and job.is_running and not job.is_detached:
            raise UsageError(
                f"Job {job.name}, which this notebook started, still runs on {', '.join(job.hosts)}.",
                f"%distributed attach {job.name} follows it, %distributed stop {job.name} ends it. "
                f"Without either it ends by itself within {job.terms.lease_s:g} s.",
            )


def choose(jobs: Sequence[Job], name: str) -> Job:
    """Return the job of this name, or the only one whose name begins so. Raises `UsageError`."""
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
    raise UsageError(
        f"{what}.", f"%distributed jobs lists them all; the latest: {known}."
    )


def whereabouts(job: Job, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts of a job in the order of its nodes, out of `hosts`, which were asked. Raises `UsageError`.

    A host that has not told of it, being down, is found by its name.
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


def known_whereabouts(job: Job, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return those hosts of a job that have told of it, in the order of `job.known`, out of `hosts`, which were asked."""
    return tuple(hosts[job.host_indices[node]] for node in job.known)
