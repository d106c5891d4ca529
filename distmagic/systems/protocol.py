"""The interface of a system's `hosts.py`, so that a type checker finds missing parts; and what held
hosts have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from distmagic.connection.connections import Connect
from distmagic.connection.prompts import NotebookAsker
from distmagic.diagnosis.finding import Finding
from distmagic.errors import DistmagicError, NodeLost, RunError
from distmagic.request.access import Access
from distmagic.request.hosts import Host, Hosts, Source
from distmagic.request.systems import Wanted, part
from distmagic.transports import Transport
from distmagic.transports.asking import Asker

Asked = Any  # returned by the system's own `asked`


class Held(Protocol):
    """Hosts from a system: an allocation, a cluster."""

    title: str  # its display name
    source: Source
    hosts: Hosts = ()  # () until they are known
    error: DistmagicError | None = None  # how it ended, None before
    awaited_by: set[NotebookAsker]  # the runs that wait for it
    awaited: int  # the number of hosts it will have, as far as known

    @property
    def is_alive(self) -> bool:
        """Whether the hosts are usable, as far as known."""
        return self.error is None

    def fits(self, request: Asked) -> bool:
        """Whether the hosts satisfy a cell's request, which may be for another system."""

    def check(self, asker: Asker) -> bool:
        """Return whether the next run can use the hosts."""

    def wait(self, asker: NotebookAsker, tell: Callable[[str], object]) -> Hosts:
        """Wait for the hosts and return them; `tell` gets the reason for the wait.

        Raises the reason if there are none.
        """

    def transport(self, host: Host, access: Access, asker: Asker) -> Transport:
        """Return a transport to one of the hosts. Raises the errors of connecting."""

    def advise(self, error: RunError) -> None:
        """Add advice to the error of a run on its hosts, as far as it is involved."""
        if isinstance(error, NodeLost) and self.error is not None:
            error.hint = self.error.hint  # jobs on it have ended with it

    def findings(self, asker: Asker) -> Sequence[Finding]:  # noqa: ARG002 - some systems ask
        """Return what the system reports to be wrong with the hosts, for the doctor; () also
        without an answer.
        """
        return ()

    def end(self) -> None:
        """Release the hosts, even if jobs run on them."""

    def leave(self) -> None:
        """Release hosts without a job, because this kernel ends."""


class Pool(Protocol):
    """The hosts of one kernel from a system. Its constructor gets a function that connects by SSH.

    A system with `takes_down` in its row has more: `names` and `take_down`, as `SkyPool`.
    """

    def get(
        self, request: Asked, access: Access, asker: Asker, owner: str, *, is_elastic: bool
    ) -> Held:  # fmt: skip
        """Return hosts that are new to this kernel, pending or existing."""

    def listed(
        self, request: Asked, access: Access, asker: NotebookAsker
    ) -> Sequence[tuple[str, ...]]:
        """Return the rows of a table of everything that this user has in the system."""

    def close(self) -> None:
        """Close all connections: everything has been released."""


class GivesHosts(Protocol):
    """The interface of a system's module `hosts.py`."""

    pool: Callable[[Connect], Pool]

    def asked(self, place: str, wanted: Wanted) -> Asked:
        """Return what a cell's line requests from the system; `place` is the text after `--on`.

        Raises `UsageError`.
        """

    def preview(
        self, request: Asked, access: Access, owner: str, *, is_elastic: bool
    ) -> str:
        """Return, as text, the request that the system would get. Sends nothing."""


def hosts_of(name: str) -> GivesHosts:
    """Return the module `hosts.py` of the named system."""
    module: GivesHosts = part(name, "hosts")
    return module
