"""Opens links to the hosts of a run, during the run and after it."""

from __future__ import annotations

from contextlib import closing
from functools import partial

from distmagic.connection.connections import Connections
from distmagic.connection.link import Link
from distmagic.connection.parallel import begin_all, close_result
from distmagic.connection.prompts import NotebookAsker, asker_of
from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.request.access import Access
from distmagic.request.hosts import Hosts

UNKNOWN_HOST = -1  # the index of a host that this notebook does not know


@frozen
class Fleet:
    """The hosts of a run or a request, and how to reach them.

    A host's index is its position in `known`: first `hosts`, then `spare` ones, which may still
    join the job.
    """

    hosts: Hosts
    access: Access
    spare: Hosts = ()

    @property
    def known(self) -> Hosts:
        """All hosts that have an index."""
        return (*self.hosts, *self.spare)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all `known` hosts."""
        return tuple(host.name for host in self.known)


@frozen
class LinkOpener:
    """Opens links to the hosts of a fleet, by host index. `asker` asks the questions of the run."""

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
        """Open one more link to a host, to replace a `broken` one, which is closed.

        A link may break alone, because its process on the host was killed. So its connection, which
        other runs share, is reused as long as it can start a process.

        Questions go to `asker`, by default to the run's. Without `can_ask` a question raises
        `AuthenticationError` at once. Raises `UsageError` for a host that this notebook does not
        know, and the errors of `Connections.link`.
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
        """Open one more link to a host when the run is over, or continues elsewhere; this thread
        asks questions.

        `asker` belongs to the caller: the run's own is closed, or served by its own thread. Raises
        the errors of `link`.
        """
        link = partial(self.link, asker=asker)
        (opening,) = begin_all("reach", link, [host_index])
        try:
            asker.serve_until_done([opening])
        except BaseException:
            # An interrupt: nothing will use the link.
            opening.add_done_callback(close_result)
            raise
        return opening.result()

    def link_again(self, host_index: int) -> Link:
        """Open one more link to a host after its run has ended; this thread asks questions."""
        with closing(asker_of()) as asker:
            return self.link_after_run(host_index, asker)
