"""From a plan to events: starts every node, listens to all of them (a thread each), and stops them.

Plan  --Launch-->  Event, Event, ...
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from distmagic.connection import job_requests
from distmagic.connection.link import Link
from distmagic.connection.reach import PARALLEL, raise_first
from distmagic.errors import ConnectionLost, DistmagicError, Unreachable
from distmagic.payload.blobs import LocalBlob
from distmagic.payload.pack import Payload
from distmagic.planning.plan import Plan
from distmagic.planning.start_messages import start_message
from distmagic.remote.gang.liveness import FORM_S, MOST_NODES
from distmagic.remote.wire import protocol
from distmagic.runner.delivery import Delivery
from distmagic.runner.elastic_join import FIRST_PAUSE_S, LONGEST_PAUSE_S, NOWHERE, Ground, Growth, Intake, lost_at_start
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.node_joiner import NodeJoiner
from distmagic.runner.rollback import cancelled, take_back
from distmagic.state.events import Broken, Event, Gone, Lost, Mended, Sending, Starting, Warned


@dataclass(slots=True)
class _Heard:
    """What a listening thread has heard of its node: the last event's number, its end, {rank: bytes} of small results."""

    last: int = 0
    is_final: bool = False
    small: dict[int, int] = field(default_factory=dict)


class Launch:
    """One run under way. `batch` yields its events; `stop` ends it; `close` lets go of everything.

    `links` are by node rank, `places` says of each node which host it is on: who comes back to an elastic job is a new
    node. `reopen` connects to a host, by its place, once more.
    """

    def __init__(
        self, job: str, links: Mapping[int, Link], places: Sequence[int], lease_s: float,
        reopen: Callable[[int], Link], began: float | None = None,
    ) -> None:  # fmt: skip
        self.job, self.links, self.lease_s = job, dict(links), lease_s
        self.places = list(places)
        self.small_results: dict[tuple[int, int], bytes] = {}  # by node rank and rank: a host speaks for its own only
        self._began, self._reopen = time.monotonic() if began is None else began, reopen
        self.rest: Callable[[int, Link], None] = lambda _, link: link.finish()  # where a conversation goes afterwards
        self._stops: dict[int, protocol.StopNode] = {}
        self._missed: set[int] = set()  # nodes that ended because they, or the way to them, were lost
        self._resting: list[Link] = []  # they are no longer ours
        self._inbox = EventQueue(len(places), lambda: self.elapsed_s)
        self._intake: Intake | None = None
        self._growth: Growth | None = None
        self._payload: tuple[LocalBlob, ...] = ()
        self._begun: protocol.StartNode | None = None  # what the lead was told
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="distmagic-run")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began, by the notebook's clock."""
        return time.monotonic() - self._began

    # ---- beginning

    def start(self, plan: Plan, payload: Payload, watch: Callable[[Sequence[Future[Any]]], object] = wait) -> None:
        """Bring the payload to every host and start every agent. If one can't be started, none is left running.

        `watch` waits for futures; where it raises KeyboardInterrupt, this raises `Cancelled`.
        """
        started: list[Future[None]] = []
        secret = secrets.token_hex(32)  # of the gang channel
        self._payload = payload.blobs
        try:
            delivery = [self._pool.submit(self._deliver, plan)]
            watch(delivery)
            raise_first(delivery)
            for node in plan.nodes:
                self._inbox.put(node.node_rank, Starting())
                link = self.links[node.node_rank]
                request = start_message(plan, node, payload, secret, link.warm)
                self._begun = self._begun or request
                started.append(self._pool.submit(link.start, request))
            watch(started)
            lost = lost_at_start(plan, [one.exception() for one in started])
            for node_rank, why in lost.items():
                self._lose(node_rank, why)
            if not lost:
                raise_first(started)
        except BaseException as error:
            unsure = take_back(self._pool, tuple(self.links.values()), started)
            if isinstance(error, KeyboardInterrupt):
                raise cancelled(began=bool(started), unsure=unsure) from None
            if isinstance(error, ConnectionLost) and not error.hint:
                error.hint = (
                    "What had started elsewhere was stopped. Look at that host's memory and disk, and run it again."
                )
            raise
        self._begin()

    def _deliver(self, plan: Plan) -> None:
        def tell(node_rank: int, sent_bytes: int, total_bytes: int) -> None:
            self._inbox.put(node_rank, Sending(sent_bytes=sent_bytes, total_bytes=total_bytes))

        def note(node_rank: int, text: str) -> None:
            self._inbox.put(node_rank, Warned(text=f"{self.links[node_rank].host.name}: {text}"))

        Delivery(tuple(self.links.values()), [node.address for node in plan.nodes], self._payload, tell, note).run()

    def take_in(self, intake: Intake) -> None:
        """Let hosts come (back) to the job, which is elastic: those that are lost, and those that it awaits."""
        self._intake = intake

    def host_of(self, node_rank: int) -> int:
        """Return which of the job's hosts a node is on."""
        return self.places[node_rank]

    def attach(self) -> None:
        """Follow a job that was started before, from its first event on; nodes without a link as soon as there is one."""
        for node_rank, link in self.links.items():
            link.attach(protocol.FollowJob(job=self.job, node_rank=node_rank))
        self._begin()

    def _begin(self) -> None:
        awaited = self._intake.awaited if self._intake is not None else ()
        self._growth = self._grow(self._intake) if self._intake is not None else None
        lost = [self.places[node_rank] for node_rank in self._missed]
        for node_rank in set(range(len(self.places))) - self._missed:
            self._in_thread(self._listen, node_rank, self.links.get(node_rank))
        for place in (*lost, *awaited):
            self._in_thread(self._await, place)
        self._in_thread(self._keep_lease)

    def _grow(self, intake: Intake) -> Growth:
        ground = Ground(
            reopen=self._reopen, is_over=lambda seconds: bool(self._stops) or self._over.wait(seconds),
            newest=lambda place: max((n for n, other in enumerate(self.places) if other == place), default=-1),
            lose=self._lose,
            warn=lambda text: self._inbox.put(0, Warned(text=text)),
        )  # fmt: skip
        return Growth(NodeJoiner(self.job, intake.open_lead, self._begun, self._payload), ground)

    def _in_thread(self, act: Callable[..., None], *args: object) -> None:
        threading.Thread(target=act, args=args, daemon=True).start()

    # ---- going on

    def _listen(self, node_rank: int, link: Link | None) -> None:
        """Follow a host's nodes: the one it is, and in an elastic job those that it becomes when it comes back."""
        self._follow(node_rank, link)
        if node_rank in self._missed:
            self._await(self.places[node_rank])

    def _await(self, place: int) -> None:
        """Follow the nodes of a host that is not there (any more)."""
        while self._growth is not None and (back := self._growth.come_back(place)) is not None:
            node_rank, link = back
            self.links[node_rank] = link
            if self._stops or self._over.is_set():
                _send_quietly(link, protocol.StopNode(grace_s=0.0, reason="too late"))
            self._follow(node_rank, link)
            if node_rank not in self._missed:
                return

    def _enlisted(self, message: protocol.NodeAdded) -> None:
        """Count the nodes that have come to an elastic job, and follow those that another notebook starts."""
        for host in message.hosts[len(self.places) : MOST_NODES]:
            place = self._intake.place_of(host) if self._intake is not None else NOWHERE
            node_rank = len(self.places)
            self._inbox.add_node()
            self.places.append(place)
            if place == NOWHERE:
                self._pass_over(node_rank, host)
            elif self._growth is None or not self._growth.take_seat(message.request_id, node_rank):
                self._in_thread(self._meet, node_rank)

    def _pass_over(self, node_rank: int, host: str) -> None:
        """Do without a node that can't be followed from here."""
        if self._intake is None:  # the job is over, and no host knows of this node
            self._inbox.put(node_rank, Lost(why="it never began"))
            return
        text = f"{host} has come to the job, and is not among the hosts of this notebook: its ranks are not shown here."
        cure = "Name it with %distributed hosts and attach to see them."
        self._inbox.put(node_rank, Warned(text=f"{text} {cure}"))
        self._inbox.put(node_rank, Lost(why="it is not among the hosts of this notebook"))

    def _meet(self, node_rank: int) -> None:
        """Follow a node that another notebook is about to start, as soon as its host knows of it.

        If that doesn't come about, this notebook takes the host in itself.
        """
        give_up, pause = time.monotonic() + FORM_S, FIRST_PAUSE_S
        while time.monotonic() < give_up and not self._over.wait(pause):
            pause = min(2 * pause, LONGEST_PAUSE_S)
            if (link := self._met(node_rank)) is not None:
                self._listen(node_rank, link)
                return
        self._lose(node_rank, "it never began")
        self._await(self.places[node_rank])

    def _met(self, node_rank: int) -> Link | None:
        try:
            link = self._reopen(self.places[node_rank])
            if all((one.job, one.node_rank) != (self.job, node_rank) for one in link.jobs()):
                link.close()
                return None
            self._join_again(node_rank, link, 0)
        except DistmagicError:
            return None
        return link

    def _join_again(self, node_rank: int, link: Link, after: int) -> None:
        """Go on with a node over a new conversation, after event `after`."""
        link.attach(protocol.FollowJob(job=self.job, node_rank=node_rank, after=after))
        if node_rank in self._stops:
            link.send(self._stops[node_rank])  # it may have been lost with the connection
        self.links[node_rank] = link

    def _lose(self, node_rank: int, why: str) -> None:
        self._missed.add(node_rank)
        self._inbox.put(node_rank, Lost(why=why))

    def _follow(self, node_rank: int, link: Link | None) -> None:
        """Put a node's events on the queue until its agent is gone; over a new connection where one breaks, or is none."""
        heard = _Heard()
        try:
            next_link: Link | None = link or self._mend(node_rank, 0, "it could not be reached")
            while next_link is not None:
                next_link = self._hear_or_mend(node_rank, next_link, heard)
        except DistmagicError as error:
            if heard.is_final:
                self._inbox.put(node_rank, Gone())
            else:
                self._lose(node_rank, error.message)
        except Exception as error:  # noqa: BLE001 - a bug here must end the run, not let it wait for ever
            self._inbox.put(node_rank, Lost(why=f"a fault of distmagic: {error!r}"))

    def _hear_or_mend(self, node_rank: int, link: Link, heard: _Heard) -> Link | None:
        """Listen to a link to its end; return the one to go on with, None when there is nothing more to hear."""
        try:
            self._hear(node_rank, link, heard)
        except ConnectionLost as error:
            if heard.is_final:
                raise
            return self._mend(node_rank, heard.last, error.message)
        return None

    def _hear(self, node_rank: int, link: Link, heard: _Heard) -> None:
        """Take events until the agent is gone, then fetch its small results."""
        for n, message in link.events():
            heard.last = n
            self._inbox.put(node_rank, message)
            if isinstance(message, protocol.NodeAdded) and node_rank == 0:
                self._enlisted(message)
            heard.is_final = heard.is_final or isinstance(message, protocol.Final)
            if isinstance(message, protocol.Final) and message.reason == "lost" and node_rank != 0:
                self._missed.add(node_rank)
            if isinstance(message, protocol.Ended) and job_requests.is_small(message.result_bytes):
                heard.small[message.rank] = message.result_bytes or 0
        if not heard.is_final:
            self._lose(node_rank, _agent_gone(link.agent_error))
            return
        small = job_requests.small_results(link, self.job, node_rank, heard.small)
        self.small_results.update({(node_rank, rank): data for rank, data in small.items()})
        self._resting.append(link)
        self.rest(self.places[node_rank], link)
        self._inbox.put(node_rank, Gone())

    def _mend(self, node_rank: int, last: int, why: str) -> Link:
        """Connect again and go on after event `last`. Raises `ConnectionLost` when the lease has run out before that."""
        self._inbox.put(node_rank, Broken(why=why))
        give_up, pause = time.monotonic() + self.lease_s, FIRST_PAUSE_S
        while time.monotonic() < give_up and not self._over.wait(pause):
            pause = min(2 * pause, LONGEST_PAUSE_S)
            try:
                link = self._reopen(self.places[node_rank])
                link.kept = self.links[node_rank].kept if node_rank in self.links else None
                if link.kept is not None:
                    link.send(link.kept)
                self._join_again(node_rank, link, last)
            except (ConnectionLost, Unreachable):
                continue
            self._inbox.put(node_rank, Mended())
            return link
        raise ConnectionLost(f"no connection for {self.lease_s:g} s")

    def batch(self, timeout_s: float) -> list[Event]:
        """Return the events that have come, after at most `timeout_s`; [] for none."""
        return self._inbox.batch(timeout_s)

    def _keep_lease(self) -> None:
        while not self._over.wait(self.lease_s / 4):
            self._say(list(self.links), protocol.RenewLease())

    def stop(self, node_ranks: Sequence[int], grace_s: float, reason: str) -> None:
        """Ask nodes to end: SIGTERM, and SIGKILL after `grace_s`. Returns at once; their events tell the rest."""
        message = protocol.StopNode(grace_s=grace_s, reason=reason)
        self._stops.update(dict.fromkeys(node_ranks, message))
        self._say(node_ranks, message)

    def detach(self) -> None:
        """Have the lead let the job live without this notebook; it tells when that is so."""
        self._say([0], protocol.DetachJob())

    def ask_stacks(self) -> str:
        """Ask all ranks where they are; return the name by which the events that answer know the request."""
        request_id = secrets.token_hex(8)
        self._say(list(self.links), protocol.DumpStacks(request_id=request_id))
        return request_id

    def _say(self, node_ranks: Sequence[int], message: protocol.Message) -> None:
        for link in [self.links[node] for node in node_ranks if node in self.links]:
            self._pool.submit(_send_quietly, link, message)

    # ---- the end

    def close(self) -> None:
        """Hang up everywhere. Agents that still run end with their lease."""
        self._over.set()
        self._inbox.close()
        for link in list(self.links.values()):
            if link not in self._resting:
                link.close()
        self._pool.shutdown(wait=False)


def _send_quietly(link: Link, message: protocol.Message) -> None:
    try:
        link.send(message)
    except DistmagicError:
        return  # the listening thread notices the same, and tells it


def _agent_gone(error: str) -> str:
    return f"its agent broke down: {error}" if error else "its agent ended without a word (was it killed?)"
