"""The first links of a run: all hosts are connected to at once, while the notebook's own statements
still run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from distmagic.connection.link import Link
from distmagic.connection.link_opener import LinkOpener
from distmagic.connection.parallel import in_parallel, join_errors, threads_for
from distmagic.connection.warm_hosts import WarmHosts
from distmagic.errors import (
    Cancelled,
    ConnectionLost,
    DistmagicError,
    Unreachable,
)
from distmagic.payload import blobs
from distmagic.remote.records import expiry
from distmagic.request.spec import JobSpec

# Extra time for slow hosts: a frozen host, or one with a frozen file server, takes 30 s.
_LONGER_S = 10.0


class FirstLinks:
    """Links to the hosts of a fleet, opened in the background. `opener` opens further ones.

    After `settle`, `absent` has the hosts without which the job starts: by index, with their
    errors.
    """

    def __init__(
        self, opener: LinkOpener, warm_hosts: WarmHosts, spec: JobSpec | None = None
    ) -> None:
        blobs.folder()  # once now, instead of once for each host
        self.opener = opener
        self.fleet = opener.fleet
        self.absent: dict[int, str] = {}
        self.is_settled = False  # whether `settle` has returned links
        self._pool = threads_for(len(self.fleet.hosts) + 1, "reach")
        self.futures: list[Future[Link]] = [
            self._pool.submit(
                warm_hosts.first_link, host, self.fleet.access, opener.asker, spec
            )
            for host in self.fleet.hosts
        ]
        self._pool.submit(expiry.tidy)  # this machine stores payloads too

    def wait(
        self,
        enough: int | None = None,
        *,
        needs_remote: bool = False,
        until_done: Callable[[list[Future[Link]]], None] | None = None,
    ) -> dict[int, Link]:
        """Wait for all hosts and `settle`.

        Meanwhile this thread asks questions (passphrases, one-time passwords). `until_done` waits
        for the futures and asks instead. Raises `Cancelled` for an interrupt.
        """
        if until_done is None:
            until_done = self.opener.asker.serve_until_done
        try:
            until_done(self.futures)
        except KeyboardInterrupt:
            raise self.interrupted() from None
        except BaseException:
            self.cancel()
            raise
        return self.settle(enough, needs_remote=needs_remote)

    def each(self) -> list[Link | DistmagicError]:
        """Wait for all hosts, and return for each one its link or its error. Raises `Cancelled`.

        A host that takes much longer than the others counts as not answering.
        """
        access = self.fleet.access
        patience_s = max(_LONGER_S, access.connect_timeout_s)
        try:
            self.opener.asker.serve_until_done(self.futures, patience_s)
        except KeyboardInterrupt:
            raise self.interrupted() from None
        self._pool.shutdown(wait=False)
        self.is_settled = True
        found: list[Link | DistmagicError] = []
        for host, future in zip(self.fleet.hosts, self.futures, strict=True):
            if not future.done():
                future.add_done_callback(self._give_back)
                what = f"gave no answer for {patience_s:g} s, and other hosts did."
                hint = f"Is the machine overloaded, or its home directory's file server down? Try: {access.by_hand(host)} true"
                found.append(Unreachable(host.name, what, hint))
                continue
            error = future.exception()
            if isinstance(error, DistmagicError):
                found.append(error)
            else:
                found.append(future.result())
        return found

    def settle(
        self, enough: int | None = None, *, needs_remote: bool = False
    ) -> dict[int, Link]:
        """Wait for all `futures`, and return one open link a host, by host index and in order.

        If at least `enough` hosts answered, unreachable ones are left out: see `present` and
        `absent`. With `needs_remote`, one of them must be remote, because other hosts can't connect
        to this machine. Otherwise all links are closed, and the one error or `HostErrors` is
        raised.
        """
        hosts = self.fleet.hosts
        errors = {
            host_index: error
            for host_index, future in enumerate(self.futures)
            if (error := future.exception()) is not None
        }
        there = [host for index, host in enumerate(hosts) if index not in errors]
        is_enough = enough is not None and len(there) >= enough
        if needs_remote and all(host.is_local for host in there):
            is_enough = False
        # A host that is out of reach may come back by itself; a host that refuses the log-in does
        # not.
        may_come_back = all(
            isinstance(error, (Unreachable, ConnectionLost))
            for error in errors.values()
        )
        if errors and not (is_enough and may_come_back):
            self.cancel()
            raise join_errors(list(errors.values()))
        self._pool.shutdown(wait=False)
        for host_index, error in errors.items():
            first_line, _, _ = str(error).partition("\n")
            self.absent[host_index] = first_line
        self.is_settled = True
        return {index: self.futures[index].result() for index in self.present}

    @property
    def present(self) -> tuple[int, ...]:
        """The indices of the hosts whose links `settle` has returned."""
        count = len(self.fleet.hosts)
        return tuple(index for index in range(count) if index not in self.absent)

    def interrupted(self) -> Cancelled:
        """Give up because of an interrupt, and return the error to raise."""
        waiting = [
            host.name
            for host, future in zip(self.fleet.hosts, self.futures, strict=True)
            if not future.done()
        ]
        self.cancel()
        hint = f"No answer had come yet from {', '.join(waiting)}." if waiting else ""
        return Cancelled(
            "Interrupted while the hosts were being reached; nothing was started.", hint
        )

    def cancel(self) -> None:
        """Give up, and keep only the connections and the warm processes."""
        self.opener.asker.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        done = []
        for future in self.futures:
            if future.done():
                done.append(future)
            else:
                future.add_done_callback(self._give_back)
        in_parallel(self._give_back, done)

    def _give_back(self, future: Future[Link]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.opener.connections.give_back(future.result())

    @contextmanager
    def opened(
        self, enough: int | None = None, *, needs_remote: bool = False
    ) -> Iterator[dict[int, Link]]:
        """Wait for all hosts and yield their links by host index.

        After the block they are idle; after an error they are closed.
        """
        links = self.wait(enough, needs_remote=needs_remote)
        try:
            yield links
        except BaseException:  # an answer may still be on its way
            in_parallel(Link.close, links.values())
            raise
        in_parallel(self.opener.connections.keep_idle, links.values())
