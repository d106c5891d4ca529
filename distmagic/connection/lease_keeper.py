"""Renews the lease of a job on the hosts where it runs."""

from __future__ import annotations

import threading
from contextlib import suppress

from distmagic.connection.link import Link
from distmagic.errors import DistmagicError
from distmagic.remote.system import threads
from distmagic.remote.wire import protocol


class LeaseKeeper:
    """Renews a lease of `lease_s` seconds over links, four times per lease, from the first link on
    until `close`.

    It has its own thread, because the main thread may wait for the user's answer. Each message has
    its own thread too, so a blocked link delays no other one. It gets its next message only after
    it has taken the last.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        # Replaced as a whole, so that it can be read at any time.
        self._links: tuple[Link, ...] = ()
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def keep_over(self, links: tuple[Link, ...]) -> None:
        """Renew over these links from now on, and over no others."""
        with self._lock:
            self._set(links)

    def keep_over_one_more(self, link: Link) -> None:
        """Renew over this link too."""
        # Many hosts start at once, each in a thread of its own.
        with self._lock:
            self._set((*self._links, link))

    def _set(self, links: tuple[Link, ...]) -> None:
        self._links = links
        if self._thread is None and links:
            self._thread = threads.begin("lease", self._renew)

    def close(self) -> None:
        """Stop renewing. The job ends when its lease expires, unless another notebook renews it."""
        self._is_over.set()

    def _renew(self) -> None:
        sending: dict[Link, threading.Thread] = {}
        while not self._is_over.wait(self._lease_s / 4):
            sending = {
                link: thread for link, thread in sending.items() if thread.is_alive()
            }
            for link in self._links:
                if link not in sending:
                    # No thread can start: the next round tries again.
                    with suppress(RuntimeError):
                        sending[link] = threads.begin(
                            "run", send_quietly, link, protocol.RenewLease()
                        )


def send_quietly(link: Link, message: protocol.Message) -> None:
    """Send a message. A broken link raises no error: the thread that reads from it reports the
    same.
    """
    try:
        link.send(message)
    except DistmagicError:
        return
