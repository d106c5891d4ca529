"""Links to the hosts of a run, and their devices: all are waited for, and given back where no run comes of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import partial

from distmagic.connection.lease_keeper import LeaseKeeper
from distmagic.connection.link import Link
from distmagic.connection.parallel import in_parallel, raise_first, threads_for
from distmagic.connection.reach import Reaching
from distmagic.connection.requests import host_requests
from distmagic.errors import ConnectionLost, DistmagicError, Unreachable
from distmagic.planning import devices
from distmagic.remote.wire.protocol import DeviceClaim
from distmagic.request.spec import JobSpec
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.run_loop import RunLoop
from distmagic.state.events import Connected, Unusable, Waiting, Warned

_PAUSE_S = 1.0  # until a host is asked again whether its devices are free


def connect(
    loop: RunLoop, reaching: Reaching, enough: int | None, *, needs_remote: bool = False
) -> tuple[Link, ...]:  # fmt: skip
    """Return a link to each host, showing meanwhile how far each of them is. Arguments and errors are those of `settle`."""
    for host_index, future in enumerate(reaching.futures):
        future.add_done_callback(partial(_report, loop.queue, host_index))
    try:
        loop.wait_for(reaching.futures)
    except KeyboardInterrupt:
        raise reaching.interrupted() from None
    except BaseException:
        reaching.cancel()
        raise
    return reaching.settle(enough, needs_remote=needs_remote)


def _report(queue: EventQueue, host_index: int, future: Future[Link]) -> None:
    if future.cancelled():
        return
    error = future.exception()
    if error is None:
        queue.tell(Connected(), node_rank=host_index)
    else:
        why = error.message if isinstance(error, DistmagicError) else repr(error)
        queue.tell(Unusable(why=why), node_rank=host_index)


@contextmanager
def given_back(reaching: Reaching, links: Sequence[Link]) -> Iterator[None]:
    """Where the block ends with an error of ours, let the links rest: the next cell begins over them.

    After anything else, an interrupt say, an answer may be on its way over them: they are closed.
    """
    try:
        yield
    except DistmagicError:
        in_parallel(reaching.give_back, reaching.present, links)
        raise
    except BaseException:
        in_parallel(Link.close, links)
        raise


# ---- devices


def claim_devices(
    loop: RunLoop,
    reaching: Reaching,
    links: tuple[Link, ...],
    spec: JobSpec,
    job: str,
) -> tuple[Link, ...]:
    """Have all hosts keep `--devices` for this job, waiting for those that other jobs have; return the links by then.

    With --no-wait it raises `PreflightError` in place of waiting, and nothing is kept. After any other error or an
    interrupt the links are closed, which gives devices back.
    """
    if not spec.devices:
        return links
    with _closed_after_error(links):
        before = _claimed_at_once(loop, links, spec, job)
    for link, claims in zip(links, before, strict=True):
        if claims and spec.no_wait:
            raise devices.refusal(link.host.name, claims)
    if not any(before):
        return links
    # What hosts keep loaded for this run must outlast the waiting.
    current = list(links)
    lease_keeper = LeaseKeeper(reaching.access.lease_s)
    with _closed_after_error(current), closing(lease_keeper):
        while True:
            lease_keeper.keep_over(tuple(current))
            try:
                if _wait_for_all(loop, current, spec, job, reaching.access.lease_s):
                    return tuple(current)
            except (ConnectionLost, Unreachable):
                # What that host kept is lost. To wait for it once more, nothing may be kept of hosts after it.
                _begin_anew(loop, reaching, current, job)


def _wait_for_all(
    loop: RunLoop, links: Sequence[Link], spec: JobSpec, job: str, lease_s: float
) -> bool:
    """Wait for one host after the other; return whether the job has the devices of all of them, now for good.

    Until then each host keeps them under a lease, because this machine may sleep. Where one has given them to another run
    meanwhile, all are given back.
    """
    for node_rank in devices.waiting_order([one.facts for one in links]):
        _wait_for_turn(loop, links[node_rank], node_rank, spec, job, lease_s)
    before = _claimed_at_once(loop, links, spec, job)
    for link, claims in zip(links, before, strict=True):
        if claims:
            loop.note(Warned(text=devices.lapsed(link.host.name, claims)))
    return not any(before)


def _begin_anew(loop: RunLoop, reaching: Reaching, links: list[Link], job: str) -> None:
    """Give all devices back, over new links where they are broken. Raises `Unreachable` for a host that is gone."""

    def give_back(node_rank: int) -> Link:
        old = links[node_rank]
        try:
            host_requests.claim_devices(old, job, (), waits=False)
        except (ConnectionLost, Unreachable):
            old.close()
        else:
            return old
        new = reaching.link(reaching.present[node_rank], broken=old)
        if old.warm is not None:
            new.warm = new.kept = old.warm
            new.send(old.warm)
        return new

    pool = threads_for(len(links), "devices")
    given_back = [pool.submit(give_back, rank) for rank in range(len(links))]
    pool.shutdown(wait=False)
    try:
        loop.wait_for(given_back)
        raise_first(given_back)
    except BaseException:
        for future in given_back:
            future.add_done_callback(_close)
        raise
    links[:] = [future.result() for future in given_back]


def _close(opening: Future[Link]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _claimed_at_once(
    loop: RunLoop, links: Sequence[Link], spec: JobSpec, job: str
) -> list[tuple[DeviceClaim, ...]]:
    """Get the devices of all hosts, or of none; return the claims of jobs before this one, by host."""
    pool = threads_for(len(links), "devices")

    def ask(names: tuple[str, ...]) -> list[Future[tuple[DeviceClaim, ...]]]:
        asked = []
        for link in links:
            asked.append(
                pool.submit(host_requests.claim_devices, link, job, names, waits=False)
            )
        loop.wait_for(asked)
        return asked

    try:
        before = [future.result() for future in ask(spec.devices)]
        if any(before):
            for future in ask(()):
                future.result()
    finally:
        pool.shutdown(wait=False)
    return before


def _wait_for_turn(
    loop: RunLoop,
    link: Link,
    node_rank: int,
    spec: JobSpec,
    job: str,
    lease_s: float,
) -> None:
    """Return as soon as a host keeps the devices for this job, under a lease; meanwhile show what it waits for."""
    pool = threads_for(1, "devices")
    pause = threading.Event()
    shown = ""
    try:
        while True:
            asked = pool.submit(
                host_requests.claim_devices,
                link,
                job,
                spec.devices,
                waits=True,
                lease_s=lease_s,
            )
            before = loop.result(asked)
            if not before:
                return
            waits_for = devices.waits_for(before)
            if spec.detach:
                waits_for += "; the run is detached when it begins, and needs this notebook until then"
            if waits_for != shown:
                loop.note(Waiting(what=waits_for), node_rank=node_rank)
                shown = waits_for
            loop.result(pool.submit(pause.wait, _PAUSE_S))
    finally:
        loop.note(Waiting(what=""), node_rank=node_rank)
        pause.set()
        pool.shutdown(wait=False)


@contextmanager
def _closed_after_error(links: Sequence[Link]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        in_parallel(Link.close, links)
        raise
