"""Performs the actions of the run loop on threads. Each action ends with an event on the queue.

It takes no decisions, and holds only the queue, the hosts, the links that it opened, and the thread
that renews the lease.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

from distmagic.connection.lease_keeper import LeaseKeeper, send_quietly
from distmagic.connection.link import Link
from distmagic.connection.link_opener import LinkOpener
from distmagic.connection.parallel import in_parallel
from distmagic.connection.requests import host_requests, job_requests
from distmagic.remote.system import threads
from distmagic.remote.wire import protocol
from distmagic.runner.actions import (
    TOO_LATE,
    Action,
    AttemptFailed,
    Close,
    Collect,
    Collected,
    Join,
    Joined,
    JoinFailed,
    Linked,
    LinkEnded,
    Listen,
    Reconnect,
    Send,
)
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.node_joiner import NodeJoiner

# time limit for the small results of one node; after it they stay on their host until they are
# accessed
COLLECT_S = 60.0


class Executor:
    """The threads of one run.

    After `close`, each ends with its current action, or with its connection. `joiner` is for
    elastic jobs only.
    """

    def __init__(
        self,
        job: str,
        queue: EventQueue,
        opener: LinkOpener,
        lease_s: float,
        joiner: NodeJoiner | None = None,
    ) -> None:
        self._job = job
        self._queue = queue
        self._opener = opener
        self._joiner = joiner
        self._is_over = False
        # Links opened by actions: the table's rows lack a link whose event is no longer read.
        # True for a link to a node that was started to join the run.
        self._opened: dict[Link, bool] = {}
        self._lock = threading.Lock()
        self._lease_keeper = LeaseKeeper(lease_s)

    def perform(self, action: Action) -> None:
        """Start an action on a thread, and return at once.

        The loop calls this on the run's own thread.
        """
        if isinstance(action, Send):
            for link in action.links:
                try:
                    threads.begin("run", send_quietly, link, action.message)
                except RuntimeError:
                    # Python is exiting and starts no threads; stop requests are sent anyway.
                    send_quietly(link, action.message)
        elif isinstance(action, Close):
            self._forget(action.link)
            threads.begin("run", action.link.close)
        else:
            threads.begin("run", self._ACTS[type(action)], self, action)

    def keep_lease_over(self, links: tuple[Link, ...]) -> None:
        """Renew the job's lease over these links from now on."""
        self._lease_keeper.keep_over(links)

    # ---- actions, each on its own thread

    def _listen(self, action: Listen) -> None:
        """Put a node's events on the queue, waiting whenever the loop has many of them unread."""
        last = action.after
        error: Exception | None = None
        try:
            for n, message in action.link.events():
                last = n
                self._queue.put(action.node_rank, message, action.link.line_bytes)
        except Exception as caught:  # noqa: BLE001 - a bug here must end the run, not let it wait for ever
            error = caught
        self._tell(
            action.node_rank, LinkEnded(link=action.link, last=last, error=error)
        )

    def _reconnect(self, action: Reconnect) -> None:
        link: Link | None = None
        try:
            self._forget(action.broken)
            link = self._opener.link(
                action.host_index, broken=action.broken, can_ask=action.can_ask
            )
            if action.broken is not None and action.broken.kept is not None:
                link.kept = action.broken.kept
                link.send(link.kept)
            request = protocol.FollowJob(
                job=self._job, node_rank=action.node_rank, after=action.after
            )
            if action.meets:
                listings = host_requests.list_jobs(link, self._job)
                found = [(one.job, one.node_rank) for one in listings]
                if (self._job, action.node_rank) not in found:
                    link.close()
                    self._tell(action.node_rank, AttemptFailed(error=None))
                    return
            link.attach(request)
        except Exception as error:  # noqa: BLE001 - the node table decides what an error means
            if link is not None:
                link.close()
            self._tell(action.node_rank, AttemptFailed(error=error))
            return
        self._tell(action.node_rank, Linked(link=link))

    def _collect(self, action: Collect) -> None:
        try:
            with action.link.bounded(COLLECT_S):
                results = job_requests.small_results(
                    action.link, self._job, action.node_rank, action.sizes
                )
            self._forget(action.link)
            self._opener.connections.keep_idle(action.link)
            collected = Collected(results=results, is_kept_idle=True)
        except Exception:  # noqa: BLE001 - also for a bug, the run ends; results wait on their host until looked at
            collected = Collected(results={}, is_kept_idle=False)
        self._tell(action.node_rank, collected)

    def _join(self, action: Join) -> None:
        assert self._joiner is not None
        link: Link | None = None
        node_rank: int | None = None
        try:
            self._forget(action.broken)
            link = self._opener.link(action.host_index, broken=action.broken)
            start = self._joiner.admit(link, action.request_id)
            node_rank = start.node_rank
            link.start(start)
        except Exception as error:  # noqa: BLE001 - the node table decides what an error means
            if link is not None:
                link.close()
            failed = JoinFailed(
                host_index=action.host_index,
                error=error,
                request_id=action.request_id,
                node_rank=node_rank,
            )
            self._tell(0, failed)
            return
        joined = Joined(
            host_index=action.host_index,
            request_id=action.request_id,
            link=link,
            node_rank=node_rank,
        )
        self._tell(0, joined)

    def _tell(self, node_rank: int, what: object) -> None:
        if isinstance(what, (Linked, Joined)) and not self._keep(what):
            # The run is over: nothing will use this link, or the node that was started.
            if isinstance(what, Joined):
                send_quietly(what.link, TOO_LATE)
            what.link.close()
            return
        self._queue.tell(what, node_rank=node_rank)

    def _keep(self, what: Linked | Joined) -> bool:
        """Register the link of `what`, which is closed at the end.

        Return False, without this, if the run is over.
        """
        with self._lock:
            if not self._is_over:
                self._opened[what.link] = isinstance(what, Joined)
            return not self._is_over

    def _forget(self, link: Link | None) -> None:
        """Unregister a link: it is being closed, or used for something else."""
        with self._lock:
            if link is not None:
                self._opened.pop(link, None)

    # ---- the end

    def close(self, links: tuple[Link, ...]) -> None:
        """Close these links, which the run still holds, and links that came too late for it.

        Agents that still run end when their lease expires.
        """
        with self._lock:
            self._is_over = True
            open_links = {*links, *self._opened}
            unread = [
                link
                for link, has_joined in self._opened.items()
                if has_joined and link not in links
            ]
        self._lease_keeper.close()
        self._queue.close()

        def hang_up(link: Link) -> None:
            if link in unread:  # nothing will use the node that was started
                send_quietly(link, TOO_LATE)
            link.close()

        in_parallel(hang_up, open_links)

    _ACTS: ClassVar[dict[type, Callable[..., None]]] = {
        Listen: _listen,
        Reconnect: _reconnect,
        Collect: _collect,
        Join: _join,
    }
