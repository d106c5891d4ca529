"""What hosts are asked apart from a run: their jobs, logs and stacks, and what they keep. No job is followed here."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed, wait
from dataclasses import dataclass
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
from distmagic.state.hangs import Explanation

T = TypeVar("T")
_LOOK_S = 0.2
# Of the logs of a rank on all hosts together, and of each stream of a host at least: Jupyter's server passes on no more
# than 3 MB at once.
_SHOWN_LOG_BYTES = 2 << 20
_LEAST_LOG_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """How far a job was ended. On the hosts in `ended` nothing of it is left.

    `unknown` says of the other hosts on which it ran why nothing is known of its end there. `was_interrupted`: the user
    did not wait for all of them.
    """

    ended: tuple[str, ...]
    unknown: Mapping[str, DistmagicError]
    was_interrupted: bool = False

    def raise_unknown(self) -> None:
        """Raise the error of a host of which nothing is known, or one for all of them."""
        if self.unknown:
            raise join_errors(list(self.unknown.values()))


@dataclass(frozen=True, kw_only=True)
class Synced:
    """The environments that hosts have ready, by name of the host; `error` names the others and why not."""

    ready: Mapping[str, EnvironmentReady]
    error: BaseException | None = None


def on_every(first_links: FirstLinks, request: Callable[[Link], T]) -> dict[int, T]:
    """Make the same request to each host that is up, and return the answers by index of the host.

    Those that are down: see `first_links.absent`. Raises what reaching hosts raises where none is up.
    """
    with first_links.opened(enough=1) as links:
        answers = in_parallel(request, list(links.values()))
        return dict(zip(links, answers, strict=True))


class Housekeeping:
    """What looks after jobs that were started before, also by other kernels; `kernel` is the name of this one."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel

    def jobs(self, first_links: FirstLinks) -> tuple[Job, ...]:
        """Return the jobs of which these hosts have something, the oldest first.

        Of several hosts some may be down: see `first_links.absent`.
        """
        listings = on_every(first_links, host_requests.list_jobs)
        names = first_links.fleet.names
        return found_jobs(
            names, [listings.get(host_index, ()) for host_index in range(len(names))]
        )

    def add(
        self, first_links: FirstLinks, job: Job, tell: Callable[[str, int], object]
    ) -> None:
        """Bring hosts into an elastic job that runs; `tell` is called with each that has come, and its node rank.

        `first_links` are the host of its first node, and then these.
        Raises `UsageError` if the job takes in no host, or not one of these, and `Cancelled` for an interrupt.
        """
        lead, *others = first_links.wait()
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
        """End a job on its own hosts, as far as they are known; returns when its processes are gone there.

        `first_links` are these hosts, in the order of `job.known`. An interrupt, and a host that can't be reached or does
        not confirm the end in time, are no errors here: see `Stopped`. Raises what `wait` raises where no host is up.
        """
        there = first_links.wait(enough=1)
        unknown: dict[str, DistmagicError] = {}
        for host_index, why in first_links.absent.items():
            unknown[job.hosts[job.known[host_index]]] = ConnectionLost(why)
        asked = []
        for host_index, link in zip(first_links.present, there, strict=True):
            if job.known[host_index] in job.running:
                asked.append((link, job.known[host_index]))

        def end(one: tuple[Link, int]) -> None:
            link, node = one
            job_requests.stop(link, job.name, node, job.terms.grace_s)

        stops = begin_all("stop", end, asked)
        was_interrupted = False
        try:
            while wait(stops, _LOOK_S).not_done:
                pass  # an interrupt that comes just before a wait is noticed when it is over
        except KeyboardInterrupt:
            was_interrupted = True
        for (_, node), stopped in zip(asked, stops, strict=True):
            host = job.hosts[node]
            if not stopped.done():
                why = "the wait for the job's end was interrupted."
                unknown[host] = Unreachable(host, why)
            elif isinstance(error := stopped.exception(), DistmagicError):
                unknown[host] = error
            else:
                stopped.result()  # it raises what is no error of ours
        in_parallel(Link.close, there)
        ended = dict.fromkeys(job.hosts[node] for node in job.known)
        return Stopped(
            ended=tuple(name for name in ended if name not in unknown),
            unknown=unknown,
            was_interrupted=was_interrupted,
        )

    def logs(
        self, first_links: FirstLinks, job: Job, rank: int, *, by_time: bool = False
    ) -> str | None:
        """Return what a rank of a job has written last, wherever it ran; None if it ran on none of these hosts.

        stdout comes before stderr, or with `by_time` their lines come as the host has read them. It is as much as a page
        shows at once, and says where more is left out. `first_links` as for `stop`.
        """

        def has_run(link: Link, node_rank: int) -> bool:
            return job_requests.has_logs(link, job.name, node_rank, rank)

        with first_links.opened() as opened:
            links = list(opened.values())
            have_it = in_parallel(has_run, links, job.known)
            nodes = [
                (link, node_rank)
                for link, node_rank, has_it in zip(
                    links, job.known, have_it, strict=True
                )
                if has_it
            ]
            if not nodes:
                return None
            # A host has two streams.
            most = max(_LEAST_LOG_BYTES, _SHOWN_LOG_BYTES // (2 * len(nodes)))

            def of_node(node: tuple[Link, int]) -> str:
                link, node_rank = node
                return job_requests.newest_logs(
                    link, job.name, node_rank, rank, most, by_time=by_time
                )

            return "".join(in_parallel(of_node, nodes))

    def stacks(self, first_links: FirstLinks, job: Job) -> Explanation:
        """Ask all ranks of a running job where they are; nothing else is changed. `first_links` as for `attach`."""
        there = first_links.wait(enough=1)
        links = dict(zip(first_links.present, there, strict=True))
        try:
            return job_requests.explained(links, job, secrets.token_hex(8))
        finally:
            # They follow the job: nothing else can be asked over them.
            in_parallel(Link.close, there)

    def profile(self, first_links: FirstLinks, job: Job, steps: int) -> Profile:
        """Profile steps of all ranks of a running job, as `profile_requests.profile`. `first_links` as for `attach`."""
        with first_links.opened(enough=1) as links:
            return profile_requests.profile(links, job.hosts, job.name, steps)

    def remove(
        self, first_links: FirstLinks, jobs: Sequence[Job], owner: str = ""
    ) -> int:
        """Remove logs and results of jobs that have ended from their hosts, as far as these are up; return the bytes.

        With an `owner` each host removes only what it knows itself to be this one's, whatever another host said.
        """
        names = sorted({job.name for job in jobs})

        def from_host(link: Link) -> int:
            return sum(host_requests.remove_job(link, name, owner) for name in names)

        return sum(on_every(first_links, from_host).values())

    def cached(
        self, first_links: FirstLinks, *, removes: bool = False, owner: str = ""
    ) -> int:
        """Return the bytes that the hosts that are up keep of what was sent and made; with `removes` they are gone.

        With an `owner` without what others have made.
        """
        prune = partial(host_requests.prune_blobs, removes=removes, owner=owner)
        return sum(on_every(first_links, prune).values())

    def work_dirs(self, first_links: FirstLinks) -> dict[str, tuple[KeptWorkDir, ...]]:
        """Return the working directories that each host keeps, by the names of those that are up."""
        found = on_every(first_links, host_requests.list_work_dirs)
        names = first_links.fleet.names
        return {names[host_index]: dirs for host_index, dirs in found.items()}

    def remove_work_dirs(
        self, first_links: FirstLinks, names: Mapping[str, Sequence[str]]
    ) -> int:
        """Remove working directories, `names` by host, from the hosts that are up; return the bytes."""

        def from_host(link: Link) -> int:
            return sum(
                host_requests.remove_work_dir(link, name)
                for name in names.get(link.host.name, ())
            )

        return sum(on_every(first_links, from_host).values())

    def folder(self, first_links: FirstLinks, path: str) -> RemoteFolder:
        """Return a folder of the one host of `first_links`; a path counts from the home there."""
        with first_links.opened():
            pass  # its errors come now, and its connection is there for all files

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
        """Have each host make a virtual environment with these packages, unless it is there.

        `show` is called on this thread, again and again, with what each host has said last. Raises what reaching hosts
        raises, and `Cancelled` for an interrupt: the hosts end what they have begun then.
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
            made = begin_all("environment", on_host, list(links.values()))
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
        """Return what each host keeps loaded for this kernel; None for one that is down."""

        def of_host(link: Link) -> tuple[Template, ...]:
            return link.query(ListTemplates(owner=self._kernel), Templates).templates

        known = on_every(first_links, of_host)
        return tuple(known.get(index) for index in range(len(first_links.futures)))
