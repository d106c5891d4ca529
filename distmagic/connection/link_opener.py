"""Hosts with the way to them, and the one way to a link with each: while a run goes on, and when it is over."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial

from distmagic.connection.connections import Connections
from distmagic.connection.link import Link
from distmagic.connection.parallel import begin_all, close_result
from distmagic.connection.prompts import NotebookAsker, asker_of
from distmagic.errors import UsageError
from distmagic.request.access import Access
from distmagic.request.hosts import Host

UNKNOWN_HOST = -1  # the index of a host that this notebook does not know


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The hosts of a run or a request, and the way to them.

    A host has its index in `known`: first come `hosts`, then `spare` ones, to which a job may yet come.
    """

    hosts: tuple[Host, ...]
    access: Access
    spare: tuple[Host, ...] = ()

    @property
    def known(self) -> tuple[Host, ...]:
        """All hosts that have an index."""
        return (*self.hosts, *self.spare)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all `known` hosts."""
        return tuple(host.name for host in self.known)


@dataclass(frozen=True, kw_only=True)
class LinkOpener:
    """Opens links to the hosts of a fleet, each known by its index there. `asker` asks the questions of the run."""

    connections: Connections
    fleet: Fleet
    asker: NotebookAsker

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
        `AuthenticationError` at once. Raises `UsageError` for a host that this notebook does not know, and what
        `Connections.link` raises.
        """
        if host_index == UNKNOWN_HOST:
            raise UsageError(
                "That host is not among the hosts of this notebook.",
                "Name all hosts of the job with %distributed hosts.",
            )
        if broken is not None:
            broken.close()
        asker = asker or self.asker
        if not can_ask:
            asker = NotebookAsker(can_ask=False)
        host = self.fleet.known[host_index]
        return self.connections.link(host, self.fleet.access, asker)

    def link_after_run(self, host_index: int, asker: NotebookAsker) -> Link:
        """Open one more link to a host when the run is over, or goes on elsewhere; questions are asked on this thread.

        `asker` belongs to the caller: the one of the run is closed, or served by its own thread. Raises what `link` raises.
        """
        link = partial(self.link, asker=asker)
        (opening,) = begin_all("reach", link, [host_index])
        try:
            asker.serve_until_done([opening])
        except BaseException:
            # An interrupt: nobody takes the link any more.
            opening.add_done_callback(close_result)
            raise
        return opening.result()

    def link_again(self, host_index: int) -> Link:
        """Open one more link to a host, of whose run nobody asks any more; questions are asked on this thread."""
        with closing(asker_of()) as asker:
            return self.link_after_run(host_index, asker)
