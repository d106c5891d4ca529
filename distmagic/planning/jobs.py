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


_MOST_OF_A_NAME = 5  # jobs: two are enough to see that hosts disagree
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

    No host can pass for another one that was asked:

    - Of a node tells the host that was asked under the node's own name, and nobody else, even where it is down or knows
      nothing of the node. Of one that is called localhost another host may tell too, whose own it may be; the one that is
      so called here is believed first.
    - Where no host was asked under this name (it may have another one here), any may tell: first one whose name is that of
      no other node, then one that says that the node runs there, then the one that was asked first.
    - Which hosts a job has is told by the host of its first node, which takes in all others. A host whose list is not the
      beginning of that one is left out; so is one that came to the job while the first host's disk was full.
    - Hosts that differ in who the first host is, or, while the first one says nothing, in who the others are, tell of
      several jobs of one name: `choose` takes none of them.

    Not promised: that a host tells the truth of its own node, or of one whose host was asked under another name than the
    job has for it; and, while the first host says nothing, that one which says it has come to the job later belongs to it.
    """
    told: dict[tuple[str, str], list[_Told]] = {}
    names = set(asked)
    for index, (name, listed) in enumerate(zip(asked, answers, strict=True)):
        for one in listed:
            if not 0 <= one.node_rank < len(one.hosts):
                continue
            of_host = one.hosts[one.node_rank]
            may_be_another = of_host not in names or of_host in _EACH_ONE_S_OWN
            if of_host == name or may_be_another:
                key = (one.job, one.hosts[0])
                told.setdefault(key, []).append(_Told(index, name, one))
    jobs = [job for each in told.values() for job in _jobs(each)]
    return tuple(sorted(jobs, key=lambda job: (-job.began_ago_s, job.name)))


@dataclass(frozen=True)
class _Told:
    """What a host, by its index and the name under which it was asked, lists of a node of which it may tell."""

    index: int
    asked_as: str
    listing: JobListing


def _jobs(told: Sequence[_Told]) -> list[Job]:
    """Return the job of which hosts tell that agree on its name and its first host; several where they can't be one."""
    jobs: list[Job] = []
    of_first = [one for one in told if one.listing.node_rank == 0]
    rest = list(told)
    while rest and len(jobs) < _MOST_OF_A_NAME:
        # A node that came later knows of more hosts than those before it.
        fullest = max(rest, key=lambda one: len(one.listing.hosts))
        hosts = (_believed(of_first) if of_first else fullest).listing.hosts
        nodes: dict[int, list[_Told]] = {}
        others = []
        for one in rest:
            if one.listing.hosts == hosts[: len(one.listing.hosts)]:
                nodes.setdefault(one.listing.node_rank, []).append(one)
            else:
                others.append(one)
        jobs.append(_job(hosts, {rank: _believed(nodes[rank]) for rank in nodes}))
        rest = [] if of_first else others
    return jobs


def _believed(told: Sequence[_Told]) -> _Told:
    """Return the report about one node that counts, of those that hosts gave."""

    def rank(one: _Told) -> tuple[bool, bool, bool]:
        is_own = one.asked_as == one.listing.hosts[one.listing.node_rank]
        # Hosts with one name and one home list each other's nodes, and each sees only its own run.
        return is_own, one.asked_as not in one.listing.hosts, one.listing.is_running

    return max(told, key=rank)  # of several alike the first


def _job(hosts: tuple[str, ...], found: Mapping[int, _Told]) -> Job:
    nodes = {node_rank: found[node_rank].listing for node_rank in sorted(found)}
    first = nodes[min(nodes)]
    host_indices = [-1] * len(hosts)
    running = []
    for rank, one in sorted(found.items()):
        host_indices[rank] = one.index
        if one.listing.is_running:
            running.append(rank)
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
    if len({job.name for job in fits}) == 1:
        firsts = " and ".join(dict.fromkeys(", ".join(job.hosts) for job in fits))
        raise UsageError(
            f"Hosts disagree about job {fits[0].name}: they report different lists of its hosts: {firsts}.",
            "Name only the hosts that it has, with %distributed hosts.",
        )
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
