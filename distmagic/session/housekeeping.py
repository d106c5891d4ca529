"""What hosts are asked apart from a run: their jobs, logs and stacks, and what they keep. No job is followed here."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

from distmagic.connection import job_requests
from distmagic.connection.link import Link
from distmagic.connection.parallel import PARALLEL, in_parallel, raise_first
from distmagic.connection.reach import Reaching
from distmagic.errors import Cancelled
from distmagic.planning.jobs import Job, found_jobs
from distmagic.remote.wire.protocol import KeptWorkDir, ListTemplates, Template, Templates
from distmagic.runner.node_joiner import NodeJoiner
from distmagic.state.hangs import Explanation


class Housekeeping:
    """The part of a `Session` that looks after what was started before, also by other kernels."""

    kernel: str

    def jobs(self, reaching: Reaching) -> tuple[Job, ...]:
        """Return the jobs of which these hosts have something, the oldest first.

        Of several hosts some may be down: see `reaching.absent`.
        """
        with reaching.opened(enough=1) as links:
            listings = dict(zip(links, in_parallel(Link.jobs, list(links.values())), strict=True))
        return found_jobs([listings.get(host_index, ()) for host_index in range(len(reaching.hosts))])

    def add(self, reaching: Reaching, job: Job, tell: Callable[[str, int], object]) -> None:
        """Bring hosts into an elastic job that runs; `tell` is called with each that has come, and its node rank.

        `reaching` are the host of its first node, and then these.
        Raises `SpecError` if the job takes in no host, or not one of these, and `Cancelled` for an interrupt.
        """
        lead, *others = reaching.wait()
        joiner = NodeJoiner(job.name, partial(reaching.link, 0))

        def join(link: Link) -> int:
            start = joiner.admit(link, secrets.token_hex(8))
            link.start(start)
            link.finish()
            return start.node_rank

        pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="distmagic-add")
        names = {pool.submit(join, link): link.host.name for link in others}
        try:
            for one in as_completed(names):
                if one.exception() is None:
                    tell(names[one], one.result())
        except KeyboardInterrupt:
            hint = "%distributed jobs shows which of them have come."
            raise Cancelled(f"Interrupted while hosts were coming to job {job.name}.", hint) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for link in others:
                link.close()
            reaching.rest(0, lead)
        raise_first(list(names))

    def stop(self, reaching: Reaching, job: Job) -> None:
        """End a job on its own hosts, as far as they are known; returns when its processes are gone there.

        `reaching` are these hosts, in the order of `job.known`.
        """
        with reaching.opened() as links:
            of_node = dict(zip(job.known, links.values(), strict=True))
            in_parallel(lambda node: of_node[node].stop(job.name, node), job.running)

    def logs(self, reaching: Reaching, job: Job, rank: int) -> str | None:
        """Return what a rank of a job has written so far, wherever it ran; None if it ran on none of these hosts.

        `reaching` as for `stop`.
        """

        def of_host(link: Link, node_rank: int) -> str | None:
            return job_requests.logs(link, job.name, node_rank, rank)

        with reaching.opened() as links:
            texts = in_parallel(of_host, list(links.values()), job.known)
        found = [text for text in texts if text is not None]
        return "".join(found) if found else None

    def stacks(self, reaching: Reaching, job: Job) -> Explanation:
        """Ask all ranks of a running job where they are; nothing else is changed. `reaching` as for `attach`."""
        there = reaching.wait(enough=1)
        links = dict(zip(reaching.present, there, strict=True))
        try:
            return job_requests.explained(links, job, secrets.token_hex(8))
        finally:
            in_parallel(Link.close, there)  # they follow the job: nothing else can be asked over them

    def remove(self, reaching: Reaching, jobs: Sequence[Job]) -> int:
        """Remove logs and results of jobs that have ended from their hosts, as far as these are up; return the bytes."""
        names = sorted({job.name for job in jobs})

        def from_host(link: Link) -> int:
            return sum(link.remove(name) for name in names)

        with reaching.opened(enough=1) as links:
            return sum(in_parallel(from_host, list(links.values())))

    def cached(self, reaching: Reaching, *, removes: bool = False) -> tuple[int, ...]:
        """Return the bytes that each host that is up keeps of what was sent; with `removes` they are gone."""
        with reaching.opened(enough=1) as links:
            return tuple(in_parallel(partial(Link.clear, removes=removes), list(links.values())))

    def work_dirs(self, reaching: Reaching) -> dict[str, tuple[KeptWorkDir, ...]]:
        """Return the working directories that each host keeps, by the names of those that are up."""
        with reaching.opened(enough=1) as links:
            there = list(links.values())
            return {
                link.host.name: found for link, found in zip(there, in_parallel(Link.work_dirs, there), strict=True)
            }

    def remove_work_dirs(self, reaching: Reaching, names: Mapping[str, Sequence[str]]) -> int:
        """Remove working directories, `names` by host, from the hosts that are up; return the bytes."""

        def from_host(link: Link) -> int:
            return sum(link.remove_work_dir(name) for name in names.get(link.host.name, ()))

        with reaching.opened(enough=1) as links:
            return sum(in_parallel(from_host, list(links.values())))

    def templates(self, reaching: Reaching) -> tuple[tuple[Template, ...] | None, ...]:
        """Return what each host keeps loaded for this kernel; None for one that is down."""

        def of_host(link: Link) -> tuple[Template, ...]:
            return link.query(ListTemplates(owner=self.kernel), Templates).templates

        with reaching.opened(enough=1) as links:
            known = dict(zip(links, in_parallel(of_host, list(links.values())), strict=True))
        return tuple(known.get(host_index) for host_index in range(len(reaching.hosts)))
