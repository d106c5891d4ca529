"""From a plan to events: starts every node, listens to all of them, and stops them. The only place with run-time threads.

Plan  --Launch-->  Event, Event, ...
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from distmagic.blobs import LocalBlob
from distmagic.errors import DistmagicError
from distmagic.link import Link
from distmagic.plan import NodePlan, Plan
from distmagic.reach import PARALLEL, join_errors
from distmagic.remote import protocol
from distmagic.state import Event, Gone, Lost

SMALL_RESULT_BYTES = 1 << 20  # what comes back at once; larger results wait on their host until they are looked at


class Launch:
    """One run under way. `batch` yields its events; `stop` ends it; `close` lets go of everything."""

    def __init__(
        self, plan: Plan, links: Sequence[Link], payload: tuple[LocalBlob, LocalBlob], lease_s: float,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.plan, self.links, self.payload = plan, tuple(links), payload
        self.lease_s = lease_s
        self.small_results: dict[int, bytes] = {}
        self._clock, self._began = clock, clock()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="distmagic-run")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began, by the notebook's clock."""
        return self._clock() - self._began

    # ---- beginning

    def start(self) -> None:
        """Bring the payload to every host and start every agent. If one can't be started, none is left running."""
        delivered = [self._pool.submit(link.deliver, self.payload) for link in self.links]
        _raise_first(delivered)
        started = [
            self._pool.submit(link.start, self._request(node))
            for link, node in zip(self.links, self.plan.nodes, strict=True)
        ]
        try:
            _raise_first(started)
        except BaseException:
            self._take_back(started)
            raise
        for node_rank, link in enumerate(self.links):
            threading.Thread(target=self._listen, args=(node_rank, link), daemon=True).start()
        threading.Thread(target=self._keep_lease, daemon=True).start()

    def _request(self, node: NodePlan) -> protocol.Start:
        call, code = self.payload
        return protocol.Start(
            job=self.plan.job, node_rank=node.node_rank, torchrun=node.torchrun, env=dict(node.env),
            defaults=dict(node.defaults), cwd=node.cwd, call=call.blob.sha256, code=code.blob.sha256,
            endpoint=self.plan.endpoint, lead=node.node_rank == 0, lease_s=self.lease_s,
            max_restarts=self.plan.max_restarts,
        )  # fmt: skip

    def _take_back(self, started: Sequence[Future[None]]) -> None:
        """Stop the nodes that did start, and wait until they are gone."""
        running = [link for link, future in zip(self.links, started, strict=True) if future.exception() is None]
        for link in running:
            link.send(protocol.Stop(grace_s=0.0, reason="another host could not start"))
        for link in running:
            for _ in link.events():
                continue

    # ---- going on

    def _listen(self, node_rank: int, link: Link) -> None:
        """Put a node's events on the queue until its agent is gone; then fetch its small results."""
        small: list[protocol.Ended] = []
        final = False
        try:
            for _, message in link.events():
                self._put(node_rank, message)
                final = final or isinstance(message, protocol.Final)
                if isinstance(message, protocol.Ended) and 0 < (message.result_bytes or 0) <= SMALL_RESULT_BYTES:
                    small.append(message)
            if final:
                self._fetch_small(node_rank, link, small)
                link.finish()
                self._put(node_rank, Gone())
            else:
                self._put(node_rank, Lost(why="its agent ended without a word (was it killed?)"))
        except DistmagicError as error:
            self._put(node_rank, Gone() if final else Lost(why=error.message))

    def _fetch_small(self, node_rank: int, link: Link, ended: Sequence[protocol.Ended]) -> None:
        for one in ended:
            data = bytearray()
            name = f"rank{one.rank}.result"
            link.fetch(protocol.Fetch(job=self.plan.job, node_rank=node_rank, name=name), data.extend)
            self.small_results[one.rank] = bytes(data)

    def _put(self, node_rank: int, what: protocol.Message | Gone | Lost) -> None:
        self._events.put(Event(node_rank=node_rank, at_s=self.elapsed_s, what=what))

    def batch(self, timeout_s: float) -> list[Event]:
        """Return the events that have come, after at most `timeout_s`; [] for none."""
        found: list[Event] = []
        try:
            found.append(self._events.get(timeout=timeout_s))
            while len(found) < 100_000:
                found.append(self._events.get_nowait())
        except queue.Empty:
            return found
        return found

    def _keep_lease(self) -> None:
        while not self._over.wait(self.lease_s / 4):
            self._say(self.links, protocol.Renew())

    def stop(self, node_ranks: Sequence[int], grace_s: float, reason: str) -> None:
        """Ask nodes to end: SIGTERM, and SIGKILL after `grace_s`. Returns at once; their events tell the rest."""
        self._say([self.links[i] for i in node_ranks], protocol.Stop(grace_s=grace_s, reason=reason))

    def _say(self, links: Sequence[Link], message: protocol.Message) -> None:
        for link in links:
            self._pool.submit(_send_quietly, link, message)

    # ---- the end

    def close(self) -> None:
        """Hang up everywhere. Agents that still run end with their lease."""
        self._over.set()
        for link in self.links:
            link.close()
        self._pool.shutdown(wait=False)


def _send_quietly(link: Link, message: protocol.Message) -> None:
    try:
        link.send(message)
    except DistmagicError:
        return  # the listening thread notices the same, and tells it


def _raise_first(futures: Sequence[Future[Any]]) -> None:
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise join_errors(errors)
