"""Requests to hosts outside of a run: their jobs, logs and stacks, and their disk use.

No job is followed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed, wait
from functools import partial
from typing import TypeVar

from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link import Link
from distmagic.connection.parallel import (
    begin_all,
    in_parallel,
    join_errors,
    raise_first,
)
from distmagic.connection.requests import host_requests, job_requests, profile_requests
from distmagic.connection.requests.remote_files import RemoteFolder
from distmagic.diagnosis.profile import Profile
from distmagic.errors import Cancelled, ConnectionLost, DistmagicError, Unreachable
from distmagic.names import owner as own_name
from distmagic.planning.jobs import Job, found_jobs
from distmagic.remote.frozen import frozen
from distmagic.remote.wire.protocol import (
    EnvironmentProgress,
    EnvironmentReady,
    Folder,
    KeptWorkDir,
    ListTemplates,
    SyncEnvironment,
    Template,
    Templates,
)
from distmagic.runner.node_joiner import NodeJoiner
from distmagic.session.packages import Packages
from distmagic.state.explanation import Explanation

T = TypeVar("T")
_LOOK_S = 0.2
# Size limit of a rank's logs from all hosts together, and the minimum for each stream of a host:
# Jupyter's server passes on at most 3 MB at once.
_SHOWN_LOG_BYTES = 2 << 20
_LEAST_LOG_BYTES = 64 << 10


@frozen
class Stopped:
    """The result of stopping a job."""

    ended: tuple[str, ...]  # hosts on which nothing of it is left
    # for the other hosts on which it ran: why its end is unknown
    unknown: Mapping[str, DistmagicError]
    was_interrupted: bool = False  # the user interrupted the wait

    def raise_unknown(self) -> None:
        """Raise the error of a host in `unknown`, or one error for all of them."""
        if self.unknown:
            raise join_errors(list(self.unknown.values()))


@frozen
class Synced:
    """The environments that are ready, by host name; `error` names the other hosts with the
    reasons.
    """

    ready: Mapping[str, EnvironmentReady]
    error: BaseException | None = None


def on_every(first_links: FirstLinks, request: Callable[[Link], T]) -> dict[int, T]:
    """Send the same request to each host that is up, and return the answers by host index.

    `first_links.absent` has the hosts that are down. Raises the errors of connecting if no host is
    up.
    """
    with first_links.opened(enough=1) as links:
        answers = in_parallel(request, links.values())
        return dict(zip(links, answers, strict=True))


class Housekeeping:
    """Manages jobs that were started before, also by other kernels; `kernel` is the name of this
    kernel.
    """

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel

    def jobs(self, first_links: FirstLinks) -> tuple[Job, ...]:
        """Return the jobs that have files or processes on these hosts, oldest first.

        Some hosts may be down: see `first_links.absent`.
        """
        listings = on_every(first_links, host_requests.list_jobs)
        names = first_links.fleet.names
        return found_jobs(
            names, [listings.get(host_index, ()) for host_index in range(len(names))]
        )

    def add(
        self, first_links: FirstLinks, job: Job, tell: Callable[[str, int], object]
    ) -> None:
        """Add hosts to a running elastic job; `tell` is called with each added host and its node
        rank.

        `first_links` are the host of its first node, followed by the new hosts. Raises `UsageError`
        if the job accepts no host, or not one of these, and `Cancelled` for an interrupt.
        """
        lead, *others = first_links.wait().values()
        joiner = NodeJoiner(job.name, partial(first_links.opener.link, 0))

        def join(link: Link) -> int:
            start = joiner.admit(link, secrets.token_hex(8))
            link.start(start)
            link.finish()
            return start.node_rank

        joins = begin_all("add", join, others)
        try:
            for one in as_completed(joins):
                if one.exception() is None:
                    tell(others[joins.index(one)].host.name, one.result())
        except KeyboardInterrupt:
            hint = "%distributed jobs shows which of them have come."
            raise Cancelled(
                f"Interrupted while hosts were coming to job {job.name}.", hint
            ) from None
        finally:
            for link in others:
                link.close()
            first_links.opener.connections.keep_idle(lead)
        raise_first(joins)

    def stop(self, first_links: FirstLinks, job: Job) -> Stopped:
        """Stop a job on its hosts, as far as they are known; return when its processes have ended.

        `first_links` are these hosts, in the order of `job.known`. An interrupt, an unreachable
        host, or a host that does not confirm the end in time raise no error: see `Stopped`. Raises
        the errors of `wait` if no host is up.
        """
        found = first_links.wait(enough=1)
        links = {job.known[host_index]: link for host_index, link in found.items()}
        unknown: dict[str, DistmagicError] = {}
        for host_index, why in first_links.absent.items():
            unknown[job.hosts[job.known[host_index]]] = ConnectionLost(why)
        running = [node for node in links if node in job.running]

        def end(node: int) -> None:
            job_requests.stop(links[node], job.name, node, job.terms.grace_s)

        stops = begin_all("stop", end, running)
        was_interrupted = False
        try:
            while wait(stops, _LOOK_S).not_done:
                pass  # an interrupt just before a wait is noticed after the wait
        except KeyboardInterrupt:
            was_interrupted = True
        for node, stopped in zip(running, stops, strict=True):
            host = job.hosts[node]
            if not stopped.done():
                why = "the wait for the job's end was interrupted."
                unknown[host] = Unreachable(host, why)
            elif isinstance(error := stopped.exception(), DistmagicError):
                unknown[host] = error
            else:
                stopped.result()  # raises exceptions that are no distmagic errors
        in_parallel(Link.close, links.values())
        ended = dict.fromkeys(job.hosts[node] for node in job.known)
        return Stopped(
            ended=tuple(name for name in ended if name not in unknown),
            unknown=unknown,
            was_interrupted=was_interrupted,
        )

    def logs(
        self, first_links: FirstLinks, job: Job, rank: int, *, by_time: bool = False
    ) -> str | None:
        """Return the end of a rank's output, from all hosts on which it ran; None if it ran on none
        of these.

        stdout comes before stderr, or with `by_time` lines are in the order in which the host read
        them. The text is limited to what a page shows at once, and names what is left out.
        `first_links` as for `stop`.
        """
        with first_links.opened() as opened:
            links = dict(zip(job.known, opened.values(), strict=True))

            def has_run(node: int) -> bool:
                return job_requests.has_logs(links[node], job.name, node, rank)

            have_it = in_parallel(has_run, links)
            nodes = [
                node for node, has_it in zip(links, have_it, strict=True) if has_it
            ]
            if not nodes:
                return None
            # A host has two streams.
            most = max(_LEAST_LOG_BYTES, _SHOWN_LOG_BYTES // (2 * len(nodes)))

            def of_node(node: int) -> str:
                return job_requests.newest_logs(
                    links[node], job.name, node, rank, most, by_time=by_time
                )

            return "".join(in_parallel(of_node, nodes))

    def stacks(self, first_links: FirstLinks, job: Job) -> Explanation:
        """Ask all ranks of a running job for their stacks, without changing anything.

        `first_links` as for `attach`.
        """
        links = first_links.wait(enough=1)
        try:
            return job_requests.explained(links, job, secrets.token_hex(8))
        finally:
            # These links follow the job: no other request can use them.
            in_parallel(Link.close, links.values())

    def profile(self, first_links: FirstLinks, job: Job, steps: int) -> Profile:
        """Profile steps of all ranks of a running job, as `profile_requests.profile`.

        `first_links` as for `attach`.
        """
        with first_links.opened(enough=1) as links:
            return profile_requests.profile(links, job.hosts, job.name, steps)

    def remove(
        self, first_links: FirstLinks, jobs: Sequence[Job], owner: str = ""
    ) -> int:
        """Remove logs and results of finished jobs from those hosts that are up; return the removed
        bytes.

        With an `owner`, each host removes only jobs that its own records assign to this owner,
        whatever another host reported.
        """
        names = sorted({job.name for job in jobs})

        def from_host(link: Link) -> int:
            return sum(host_requests.remove_job(link, name, owner) for name in names)

        return sum(on_every(first_links, from_host).values())

    def cached(
        self, first_links: FirstLinks, *, removes: bool = False, owner: str = ""
    ) -> int:
        """Return the bytes of sent and generated files on the hosts that are up; with `removes`,
        delete them.

        With an `owner`, files of other owners are left out.
        """
        prune = partial(host_requests.prune_blobs, removes=removes, owner=owner)
        return sum(on_every(first_links, prune).values())

    def work_dirs(self, first_links: FirstLinks) -> dict[str, tuple[KeptWorkDir, ...]]:
        """Return the working directories on each host that is up, by host name."""
        found = on_every(first_links, host_requests.list_work_dirs)
        names = first_links.fleet.names
        return {names[host_index]: dirs for host_index, dirs in found.items()}

    def remove_work_dirs(
        self, first_links: FirstLinks, names: Mapping[str, Sequence[str]]
    ) -> int:
        """Remove working directories (`names` by host) from the hosts that are up; return the
        removed bytes.
        """

        def from_host(link: Link) -> int:
            return sum(
                host_requests.remove_work_dir(link, name)
                for name in names.get(link.host.name, ())
            )

        return sum(on_every(first_links, from_host).values())

    def folder(self, first_links: FirstLinks, path: str) -> RemoteFolder:
        """Return a folder on the only host in `first_links`; a path is relative to the home
        directory.
        """
        with first_links.opened():
            # Connects now, so that errors come early and all files share one connection.
            pass

        opener = first_links.opener

        def open_link() -> Link:
            return opener.link_after_run(0, opener.asker)

        return RemoteFolder(Folder(path=path), open_link)

    def sync_environment(
        self,
        first_links: FirstLinks,
        packages: Packages,
        show: Callable[[Mapping[str, EnvironmentProgress]], object],
    ) -> Synced:
        """Make a virtual environment with these packages on each host, unless it exists.

        `show` is called repeatedly on this thread with the latest progress of each host. Raises the
        errors of connecting, and `Cancelled` for an interrupt: the hosts then end what they have
        started.
        """
        request = SyncEnvironment(
            name=packages.name,
            requirements=packages.requirements,
            lock=dict(packages.lock),
            owner=own_name(),
        )
        latest: dict[str, EnvironmentProgress] = {}

        def on_host(link: Link) -> EnvironmentReady:
            link.send(request)
            while True:
                said: object = link.answer(EnvironmentProgress, EnvironmentReady)
                if isinstance(said, EnvironmentReady):
                    return said
                assert isinstance(said, EnvironmentProgress)
                latest[link.host.name] = said

        with first_links.opened() as links:
            made = begin_all("environment", on_host, links.values())
            try:
                while wait(made, _LOOK_S).not_done:
                    show(dict(latest))
            except KeyboardInterrupt:
                raise Cancelled(
                    "Interrupted while environments were being made.",
                    "The next call starts again.",
                ) from None
        ready = {}
        errors = []
        for link, future in zip(links.values(), made, strict=True):
            if (error := future.exception()) is not None:
                errors.append(error)
            else:
                ready[link.host.name] = future.result()
        return Synced(ready=ready, error=join_errors(errors) if errors else None)

    def templates(
        self, first_links: FirstLinks
    ) -> tuple[tuple[Template, ...] | None, ...]:
        """Return the warm processes of this kernel on each host; None for a host that is down."""

        def of_host(link: Link) -> tuple[Template, ...]:
            return link.query(ListTemplates(owner=self._kernel), Templates).templates

        known = on_every(first_links, of_host)
        return tuple(known.get(index) for index in range(len(first_links.futures)))
