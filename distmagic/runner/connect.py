"""Connects to the hosts of a run and reserves their devices.

If the run does not start, it releases both.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from distmagic.connection.connections import Connections
from distmagic.connection.first_links import FirstLinks
from distmagic.connection.lease_keeper import LeaseKeeper
from distmagic.connection.link import Link
from distmagic.connection.link_opener import LinkOpener
from distmagic.connection.parallel import (
    begin_all,
    close_result,
    in_parallel,
    raise_first,
)
from distmagic.connection.requests import host_requests
from distmagic.errors import ConnectionLost, DistmagicError, Unreachable
from distmagic.planning import devices
from distmagic.planning.plan import Plan
from distmagic.remote.wire.protocol import DeviceClaim
from distmagic.request.spec import JobSpec
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.run_loop import RunLoop
from distmagic.state.events import Connected, Unusable, Waiting

_PAUSE_S = 1.0  # pause before a host is asked again whether its devices are free


def connect(
    loop: RunLoop, first_links: FirstLinks, enough: int | None, *, needs_remote: bool = False
) -> dict[int, Link]:  # fmt: skip
    """Return a link to each host by its index, and show the progress of connecting.

    Arguments and errors are those of `settle`.
    """
    for host_index, future in enumerate(first_links.futures):
        future.add_done_callback(partial(_report, loop.queue, host_index))
    return first_links.wait(enough, needs_remote=needs_remote, until_done=loop.wait_for)


def _report(queue: EventQueue, host_index: int, future: Future[Link]) -> None:
    if future.cancelled():
        return
    error = future.exception()
    if error is None:
        queue.tell(Connected(), node_rank=host_index)
    else:
        why = error.message if isinstance(error, DistmagicError) else repr(error)
        queue.tell(Unusable(unusable=why), node_rank=host_index)


@contextmanager
def given_back(connections: Connections, links: Sequence[Link]) -> Iterator[None]:
    """If the block ends with a distmagic error, keep the links idle for the next cell.

    After any other exception, such as an interrupt, an answer may still be on its way, so the links
    are closed.
    """
    try:
        yield
    except DistmagicError:
        in_parallel(connections.give_back, links)
        raise
    except BaseException:
        in_parallel(Link.close, links)
        raise


# ---- devices


def claim_devices(
    loop: RunLoop,
    opener: LinkOpener,
    present: Sequence[int],
    links: tuple[Link, ...],
    spec: JobSpec,
    plan: Plan,
) -> tuple[Link, ...]:
    """Reserve `--devices` on all hosts for this job, waiting while other jobs use them; return the
    links after the wait.

    It repeatedly asks all hosts until all have the devices free. It reserves nothing meanwhile, so
    two runs never block each other; no order is promised. With --no-wait it raises `PreflightError`
    instead of waiting. After any other error or an interrupt the links are closed, which releases
    the devices.
    """
    if not spec.devices:
        return links
    current = list(links)
    # The warm processes for this run must survive the wait.
    lease_keeper = LeaseKeeper(plan.terms.lease_s)
    try:
        while True:
            lease_keeper.keep_over(tuple(current))
            try:
                others = _claimed_at_once(loop, current, spec, plan.job)
            except (ConnectionLost, Unreachable):
                _begin_anew(loop, opener, present, current)
                continue
            if spec.no_wait and any(others):
                break
            for node_rank, claims in enumerate(others):
                what = devices.waits_for(claims) if claims else ""
                if claims and spec.detach:
                    what += "; keep this notebook open until the run starts: then it is detached"
                loop.note(Waiting(waits_for=what), node_rank=node_rank)
            if not any(others):
                return tuple(current)
            # Wait for a random time, so that one of two runs that blocked each other goes first.
            # By a generator of its own: the notebook's may have a seed.
            pause_s = _PAUSE_S * random.Random().uniform(1, 2)  # noqa: S311  # no secret
            loop.wait_for([Future()], pause_s)
    except BaseException:
        in_parallel(Link.close, current)
        raise
    finally:
        lease_keeper.close()
    name, claims = next((link.host.name, claims) for link, claims in zip(current, others, strict=True) if claims)  # fmt: skip
    raise devices.refusal(name, claims)


def _begin_anew(
    loop: RunLoop,
    opener: LinkOpener,
    present: Sequence[int],
    links: list[Link],
) -> None:
    """Connect to all hosts again; closing the old links releases their devices.

    May raise `Unreachable`.
    """

    def reopened(node_rank: int) -> Link:
        old = links[node_rank]
        old.close()
        new = opener.link(present[node_rank], broken=old)
        if old.warm is not None:
            new.warm = new.kept = old.warm
            new.send(old.warm)
        return new

    again = begin_all("devices", reopened, range(len(links)))
    try:
        loop.wait_for(again)
        raise_first(again)
    except BaseException:
        for future in again:
            future.add_done_callback(close_result)
        raise
    links[:] = [future.result() for future in again]


def _claimed_at_once(
    loop: RunLoop, links: Sequence[Link], spec: JobSpec, job: str
) -> list[tuple[DeviceClaim, ...]]:
    """Reserve the devices of all hosts, or of none; return the claims of other jobs, by host."""

    def ask(names: tuple[str, ...]) -> list[tuple[DeviceClaim, ...]]:
        claim = partial(host_requests.claim_devices, job=job, devices=names)
        asked = begin_all("devices", claim, links)
        loop.wait_for(asked)
        return [future.result() for future in asked]

    others = ask(spec.devices)
    if any(others):
        ask(())
    return others
