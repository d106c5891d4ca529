"""What hosts are asked apart from a run: which jobs they have and where these are, what they keep. Nothing is followed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

from distmagic.connection import job_requests
from distmagic.connection.link import Link
from distmagic.connection.reach import PARALLEL, Reaching, raise_first
from distmagic.errors import Cancelled
from distmagic.planning.jobs import Job, found_jobs
from distmagic.remote.wire.protocol import ListTemplates, Template, Templates
from distmagic.runner.node_joiner import NodeJoiner
from distmagic.runner.prepare import in_parallel
from distmagic.state.hangs import Explanation


class Housekeeping:
    """The part of a `Session` that looks after what was started before, also by other kernels."""

    kernel: str

    def jobs(self, reaching: Reaching) -> tuple[Job, ...]:
        """Return the jobs of which these hosts have something, the oldest first.

        Of several hosts some may be down: see `reaching.absent`.
        """
        links = reaching.wait(enough=1)
        try:
            answers = dict(zip(reaching.present, in_parallel(Link.jobs, links), strict=True))
            return found_jobs([answers.get(place, ()) for place in range(len(reaching.hosts))])
        finally:
            in_parallel(reaching.rest, reaching.present, links)

    def add(self, reaching: Reaching, job: Job, tell: Callable[[str, int], object]) -> None:
        """Have hosts come to an elastic job that runs; `tell` hears of each that has, and which node it is.

        `reaching` are its first node's host, and then these.
        Raises `SpecError` if the job takes in no host, or not one of these, and `Cancelled` for an interrupt.
        """
        lead, *others = reaching.wait()
        newcomers = NodeJoiner(job.name, partial(reaching.link, 0))

        def start(link: Link) -> int:
            orders = newcomers.admit(link, secrets.token_hex(8))
            link.start(orders)
            link.finish()
            return orders.node_rank

        pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="distmagic-add")
        names = {pool.submit(start, link): link.host.name for link in others}
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
        links = reaching.wait()
        try:
            of_node = dict(zip(job.known, links, strict=True))
            in_parallel(lambda node: of_node[node].stop(job.name, node), job.running)
        finally:
            in_parallel(reaching.rest, range(len(links)), links)

    def logs(self, reaching: Reaching, job: Job, rank: int) -> str | None:
        """Return what a rank of a job has written so far, wherever it ran; None if it ran on none of these hosts.

        `reaching` as for `stop`.
        """
        links = reaching.wait()
        try:
            told = in_parallel(lambda link, node: job_requests.logs(link, job.name, node, rank), links, job.known)
            found = [text for text in told if text is not None]
            return "".join(found) if found else None
        finally:
            in_parallel(reaching.rest, range(len(links)), links)

    def stacks(self, reaching: Reaching, job: Job) -> Explanation:
        """Ask all ranks of a running job where they are; nothing else is changed. `reaching` as for `attach`."""
        there = reaching.wait(enough=1)
        links = dict(zip(reaching.present, there, strict=True))
        try:
            return job_requests.explained(links, job, secrets.token_hex(8))
        finally:
            in_parallel(Link.close, there)

    def remove(self, reaching: Reaching, jobs: Sequence[Job]) -> int:
        """Remove logs and results of jobs that have ended from their hosts, as far as these are up; return the bytes."""
        links = reaching.wait(enough=1)
        try:
            names = {job.name for job in jobs}
            return sum(in_parallel(lambda link: sum(link.remove(name) for name in sorted(names)), links))
        finally:
            in_parallel(reaching.rest, reaching.present, links)

    def cached(self, reaching: Reaching, *, removes: bool = False) -> tuple[int, ...]:
        """Return the bytes that each host that is up keeps of what was sent; with `removes` they are gone."""
        links = reaching.wait(enough=1)
        try:
            return tuple(in_parallel(lambda link: link.clear(removes=removes), links))
        finally:
            in_parallel(reaching.rest, reaching.present, links)

    def templates(self, reaching: Reaching) -> tuple[tuple[Template, ...] | None, ...]:
        """Return what each host keeps loaded for this kernel; None for one that is down."""
        links = reaching.wait(enough=1)
        try:
            told = in_parallel(lambda link: link.query(ListTemplates(owner=self.kernel), Templates).templates, links)
            known = dict(zip(reaching.present, told, strict=True))
            return tuple(known.get(place) for place in range(len(reaching.hosts)))
        finally:
            in_parallel(reaching.rest, reaching.present, links)
