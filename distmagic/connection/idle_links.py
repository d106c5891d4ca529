"""Links that stay open between runs: they renew the lease of warm processes, and make the next
start fast.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Hashable
from contextlib import suppress

from distmagic.connection.link import Link
from distmagic.errors import DistmagicError
from distmagic.remote.system import threads
from distmagic.remote.wire import protocol

# Time limit for all hosts together to end their side of the conversation.
_FINISH_S = 5.0


class IdleLinks:
    """At most one idle link for each host, way to reach it, and interpreter.

    Safe to use from threads. While any link is idle, a thread renews the lease of its host's warm
    processes, four times per lease.
    """

    def __init__(self) -> None:
        self._links: dict[Hashable, Link] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    def take(self, key: Hashable) -> Link | None:
        """Remove and return the idle link with this key; None if there is none."""
        with self._lock:
            return self._links.pop(key, None)

    def give(self, key: Hashable, link: Link) -> None:
        """Keep an unused link.

        A second one for the same key, or one whose host has no warm process, is ended.
        """
        with self._lock:
            is_kept = link.kept is not None and key not in self._links
            if is_kept:
                self._links[key] = link
                if self._thread is None:
                    atexit.unregister(self.close)
                    # Registered only now, so that it runs before paramiko's own exit handler, which
                    # closes all connections.
                    atexit.register(self.close)
                    self._thread = threads.begin(
                        "warm", self._keep_renewing, self._is_over
                    )
        if not is_kept:
            link.finish()

    def _keep_renewing(self, is_over: threading.Event) -> None:
        while True:
            with self._lock:
                links = list(self._links.items())
                if not links:
                    self._thread = None
                    return
            leases_s = [link.kept.lease_s for _, link in links if link.kept]
            if is_over.wait(min(leases_s) / 4):
                return
            for key, link in links:
                self._renew(key, link)

    def _renew(self, key: Hashable, link: Link) -> None:
        # A run that takes it may send a file over it, and no other message must come in between.
        with self._lock:
            if self._links.get(key) is not link:
                return
            try:
                link.send(protocol.RenewLease())
            except DistmagicError:
                del self._links[key]
            else:
                return
        link.close()

    def close(self) -> set[str]:
        """End the warm processes of hosts, and all idle links; return the names of the hosts that
        were reached.

        It takes at most `_FINISH_S` for all of them together.
        """
        if os.getpid() != self._owner:
            # A forked child that runs its parent's atexit functions: the conversations belong to
            # the parent.
            return set()
        with self._lock:
            links = list(self._links.values())
            self._links = {}
            self._thread = None
            self._is_over.set()
            self._is_over = threading.Event()
        told = set()
        # Without threads, because this also runs while Python exits, when no thread can start. So
        # it first tells all hosts to end, and then waits for each of them.
        for link in links:
            owner = link.kept.owner if link.kept else ""
            with suppress(DistmagicError):  # out of reach: the lease ends it
                link.send(protocol.EndTemplates(owner=owner))
                told.add(link.host.name)
        for link in links:
            link.end_requests()
        end_s = time.monotonic() + _FINISH_S
        for link in links:
            link.finish(max(0.0, end_s - time.monotonic()))
        return told
