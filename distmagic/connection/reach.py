"""Reaching hosts: all at once, in the background, while the notebook's own statements still run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from distmagic.connection.connections import Connections
from distmagic.connection.link import Link
from distmagic.connection.parallel import (
    close_result,
    in_parallel,
    join_errors,
    threads_for,
)
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import Cancelled, ConnectionLost, SpecError, Unreachable
from distmagic.payload.bundle import build
from distmagic.remote.records import expiry
from distmagic.request.hosts import Host
from distmagic.request.spec import Access

UNKNOWN_HOST = -1  # the index of a host that this notebook does not know


class Reaching:
    """Links to hosts that are being opened, and a run's one way to further links to these hosts.

    Links that belong to no run, to this machine or to end what a host keeps loaded, are opened by session/session.py.

    A host is known by its index in `known`: first come the `hosts` that are reached, then `spare` ones, which a job may
    yet come to. `pythons` are the interpreters of all of them. `open_link` opens the first link to a host.
    """

    def __init__(
        self, hosts: tuple[Host, ...], access: Access, asker: NotebookAsker, connections: Connections,
        pythons: tuple[str, ...], open_link: Callable[[Host, str], Link], spare: tuple[Host, ...] = (),
    ) -> None:  # fmt: skip
        self.hosts = hosts
        self.access = access
        self.pythons = pythons
        self.known = (*hosts, *spare)
        self.asker = asker
        self._connections = connections
        # Hosts that a job begins without, by index, and what is wrong with them.
        self.absent: dict[int, str] = {}
        self.is_settled = False  # `settle` has returned links
        self._pool = threads_for(len(hosts) + 1, "reach")
        self.futures = []
        # Of `spare` hosts there are interpreters, too.
        for host, python in zip(hosts, pythons, strict=False):
            self.futures.append(self._pool.submit(open_link, host, python))
        self._pool.submit(expiry.tidy)  # this machine keeps payloads too

    # ---- the first link to each host

    def wait(
        self, enough: int | None = None, *, needs_remote: bool = False
    ) -> tuple[Link, ...]:
        """Wait for all hosts and `settle`. Questions (passphrases, one-time passwords) are asked meanwhile, on this thread.

        Raises `Cancelled` for an interrupt.
        """
        try:
            self.asker.serve_until_done(self.futures)
        except KeyboardInterrupt:
            raise self.interrupted() from None
        except BaseException:
            self.cancel()
            raise
        return self.settle(enough, needs_remote=needs_remote)

    def settle(
        self, enough: int | None = None, *, needs_remote: bool = False
    ) -> tuple[Link, ...]:
        """Return one open link a host, in order, once all `futures` are done.

        Where `enough` hosts are there, those that are out of reach are left out: see `present` and `absent`; with
        `needs_remote` only if one of those that are there is not this machine, which no other host can dial. Raises
        `HostErrors`, or the one error; then all links are closed.
        """
        errors = {}
        for host_index, future in enumerate(self.futures):
            error = future.exception()
            if error is not None:
                errors[host_index] = error
        there = [
            host
            for host_index, host in enumerate(self.hosts)
            if host_index not in errors
        ]
        is_enough = enough is not None and len(there) >= enough
        if needs_remote and all(host.is_local for host in there):
            is_enough = False
        # A host that is out of reach may come back by itself; one that refuses us does not.
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
        return tuple(self.futures[host_index].result() for host_index in self.present)

    @property
    def present(self) -> tuple[int, ...]:
        """The indices of the hosts whose links `settle` has returned."""
        return tuple(
            host_index
            for host_index in range(len(self.hosts))
            if host_index not in self.absent
        )

    def interrupted(self) -> Cancelled:
        """Give up because of an interrupt, and return the error to raise."""
        waiting = [
            host.name
            for host, future in zip(self.hosts, self.futures, strict=True)
            if not future.done()
        ]
        self.cancel()
        hint = f"No answer had come yet from {', '.join(waiting)}." if waiting else ""
        return Cancelled(
            "Interrupted while the hosts were being reached; nothing was started.", hint
        )

    def cancel(self) -> None:
        """Give up: nothing is kept but the connections, and what hosts keep loaded."""
        self.asker.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        done = [
            host_index
            for host_index, future in enumerate(self.futures)
            if future.done()
        ]
        for host_index in set(range(len(self.futures))) - set(done):
            self.futures[host_index].add_done_callback(
                partial(self._give_back, host_index)
            )
        in_parallel(
            self._give_back, done, [self.futures[host_index] for host_index in done]
        )

    def _give_back(self, host_index: int, future: Future[Link]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        self.give_back(host_index, future.result())

    def give_back(self, host_index: int, link: Link) -> None:
        """Let a link rest that is not used after all, if its host keeps something loaded; else close it at once."""
        if link.kept is None or link.is_closed:
            link.close()
        else:
            self.keep_idle(host_index, link)

    @contextmanager
    def opened(
        self, enough: int | None = None, *, needs_remote: bool = False
    ) -> Iterator[dict[int, Link]]:
        """Wait for all hosts and give their links by host index. After the block they rest; after an error they end."""
        there = self.wait(enough, needs_remote=needs_remote)
        links = dict(zip(self.present, there, strict=True))
        try:
            yield links
        except BaseException:  # an answer may be on its way yet
            in_parallel(Link.close, there)
            raise
        in_parallel(self.keep_idle, list(links), there)

    # ---- further links

    def link(
        self,
        host_index: int,
        *,
        broken: Link | None = None,
        can_ask: bool = True,
        asker: NotebookAsker | None = None,
    ) -> Link:
        """Open one more link to a host, in place of a `broken` one, which is closed.

        That link may have broken alone, because its process on the host was killed. So its connection, which other runs
        share, is used again as long as a process can be started over it.

        Questions go to `asker`, by default to the one of the run. Without `can_ask` a question raises
        `AuthenticationError` at once. Raises `SpecError` for a host that this notebook does not know, and what
        `open_link` raises.
        """
        if host_index == UNKNOWN_HOST:
            raise SpecError(
                "That host is not among the hosts of this notebook.",
                "Name all hosts of the job with %distributed hosts.",
            )
        host = self.known[host_index]
        if broken is not None:
            broken.close()
        asker = asker or self.asker
        if not can_ask:
            asker = NotebookAsker(can_ask=False)
        return self._connections.link(
            host, self.access, asker, self.pythons[host_index], build()
        )

    def link_after_run(self, host_index: int, asker: NotebookAsker) -> Link:
        """Open one more link to a host when the run is over, or goes on elsewhere; questions are asked on this thread.

        `asker` belongs to the caller: the one of the run is closed, or served by its own thread. Raises what `link` raises.
        """
        pool = threads_for(1, "reach")
        opening = pool.submit(self.link, host_index, asker=asker)
        try:
            asker.serve_until_done([opening])
        except BaseException:
            # An interrupt: nobody takes the link any more.
            opening.add_done_callback(close_result)
            raise
        finally:
            pool.shutdown(wait=False)
        return opening.result()

    def keep_idle(self, host_index: int, link: Link) -> None:
        """Give back a link of which nothing more is to come."""
        self._connections.keep_idle(self.pythons[host_index], link)
