"""What a system that gives hosts has in its `hosts.py`: types alone, so that a checker sees what is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import DistmagicError, RunError
from distmagic.request.access import Access
from distmagic.request.hosts import Host, Source
from distmagic.request.systems import Wanted, named
from distmagic.transports import Transport
from distmagic.transports.asking import Asker

Connect = Callable[[Host, Access, Asker], Transport]
Asked = Any  # of this system: what its `asked` has made


class Held(Protocol):
    """Hosts that a system gives: an allocation, a cluster. `hosts` is () until they are known.

    `title` is it in words, `error` says how it ended, None before; `awaited_by` are the runs that wait for it.
    """

    title: str
    source: Source
    hosts: tuple[Host, ...]
    error: DistmagicError | None
    awaited_by: set[NotebookAsker]

    @property
    def is_alive(self) -> bool:
        """Whether the allocation can be used, as far as is known."""

    @property
    def awaited(self) -> int:
        """How many hosts it will have, as far as that is known."""

    def fits(self, request: Asked) -> bool:
        """Whether it is what a cell asks for; the request may be one of another system."""

    def check(self, asker: Asker) -> bool:
        """Return whether the next run can use the allocation."""

    def wait(
        self, asker: NotebookAsker, tell: Callable[[str], object]
    ) -> tuple[Host, ...]:
        """Return the hosts as soon as they are known; `tell` gets what it waits for. Raises why there are none."""

    def transport(self, host: Host, access: Access, asker: Asker) -> Transport:
        """Return the way to one of the hosts. Raises what connecting raises."""

    def advise(self, error: RunError) -> None:
        """Have the error of a run on its hosts say what to do, as far as it has part in it."""

    def end(self) -> None:
        """Give the hosts back, whatever runs there."""

    def leave(self) -> None:
        """Give back what no job uses: this kernel ends."""


class Pool(Protocol):
    """What one kernel has of a system. Made with what reaches a host by SSH."""

    def get(
        self, request: Asked, access: Access, asker: Asker, owner: str, *, is_elastic: bool
    ) -> Held:  # fmt: skip
        """Return hosts that are new to this kernel, pending or there."""

    def listed(
        self, request: Asked, access: Access, asker: NotebookAsker
    ) -> Sequence[tuple[str, ...]]:
        """Return the rows of a table of all that this user has of the system."""

    def close(self) -> None:
        """Close all connections: everything that was held has ended."""


class TakesDown(Pool, Protocol):
    """The pool of a system whose row says `takes_down`: what it gives may outlast this kernel."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what this kernel uses."""

    def take_down(self, name: str, asker: NotebookAsker) -> str:
        """End one of them, or one that is not held, and return what the system says. Raises `UsageError`, `Unreachable`."""


class GivesHosts(Protocol):
    """The module `hosts.py` of a system."""

    pool: Callable[[Connect], Pool]

    def asked(self, place: str, wanted: Wanted) -> Asked:
        """Return what a line asks for: `place` is what follows `--on`. Raises `UsageError`."""

    def preview(
        self, request: Asked, access: Access, owner: str, *, is_elastic: bool
    ) -> str:
        """Return the request that the system would get; none is sent."""


def hosts_of(name: str) -> GivesHosts:
    """Return the provider of hosts of the system of that name."""
    system = named(name)
    assert system is not None  # it has made the request
    module: GivesHosts = system.part("hosts")
    return module
