"""Conversations that are kept open between runs: they renew what hosts keep loaded, and begin the next run at once."""

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

_FINISH_S = 5.0  # for all hosts together to end their side of the conversation


class IdleLinks:
    """At most one conversation for each host, way and interpreter. Safe to use from threads.

    As long as one rests here a thread renews, four times a lease, what its host keeps loaded.
    """

    def __init__(self) -> None:
        self._links: dict[Hashable, Link] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    def take(self, key: Hashable) -> Link | None:
        """Return the idle link with this key, and give up on it here; None if there is none."""
        with self._lock:
            return self._links.pop(key, None)

    def give(self, key: Hashable, link: Link) -> None:
        """Keep a link that is not used any more. A second one for the key, and one whose host keeps nothing, is ended."""
        with self._lock:
            is_kept = link.kept is not None and key not in self._links
            if is_kept:
                self._links[key] = link
                if self._thread is None:
                    atexit.unregister(self.close)
                    # Only now: before paramiko's own, which closes all connections.
                    atexit.register(self.close)
                    self._wake.clear()
                    self._thread = threads.begin("warm", self._keep_renewing)
        if not is_kept:
            link.finish()

    def _keep_renewing(self) -> None:
        while True:
            with self._lock:
                leases_s = [
                    link.kept.lease_s for link in self._links.values() if link.kept
                ]
            pause_s = min(leases_s, default=4.0) / 4
            if self._wake.wait(pause_s):
                return
            with self._lock:
                links = list(self._links.items())
                if not links:
                    self._thread = None
                    return
            for key, link in links:
                self._renew(key, link)

    def _renew(self, key: Hashable, link: Link) -> None:
        # A run that takes it may send a file over it, and nothing must come between.
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
        """End what the hosts keep loaded, and all idle links; return the names of the hosts that were reached.

        It takes at most `_FINISH_S` for all of them together.
        """
        if os.getpid() != self._owner:
            # A forked child that runs its parent's atexit functions: the conversations are the parent's.
            return set()
        with self._lock:
            links = list(self._links.values())
            self._links = {}
            self._thread = None
            self._wake.set()
            self._wake = threading.Event()
        told = set()
        # No threads: this is also called when Python ends, which refuses to start any. So all hosts are told to end
        # first, and only then it is waited for each of them; meanwhile the others end, too.
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
