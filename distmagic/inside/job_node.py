"""The place of this process in a job, and reading the variables that define it. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen

Environ = Mapping[str, str]
_FIRST_PORT, _PORTS = 20_000, 10_000
_CANDIDATES = 8


@frozen
class RankTask:
    """One rank of a job that starts one process for each rank.

    Names are torch's; `said_by` are the variables that define it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    said_by: str


@frozen
class JobNode:
    """One process of a job that a system has started on all nodes."""

    system: str  # system and job in words: "Slurm job 123"
    key: str  # equal on all nodes of one job, and unique to it
    node_rank: int
    lead: str  # name or address of node 0
    names: tuple[str, ...]  # all nodes, in order, for messages
    # the rank of this process, None if there is one process for each node
    task: RankTask | None = None

    @property
    def nnodes(self) -> int:
        """The number of nodes of the job."""
        return len(self.names)

    @property
    def words(self) -> str:
        """A text for messages: "inside Slurm job 123, node 1 of 2"."""
        return f"inside {self.system}, node {self.node_rank} of {self.nnodes}"

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports on which node 0 may listen, equal on all nodes: it takes the first free one."""
        found = []
        for number in range(_CANDIDATES):
            digest = hashlib.sha256(f"{self.key} {number}".encode()).digest()
            found.append(_FIRST_PORT + int.from_bytes(digest[:4], "big") % _PORTS)
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Variables:
    """The variables of one system. A missing or wrong one raises `UsageError` that names it."""

    system: str
    _environ: Environ

    def has_any(self, *names: str) -> bool:
        """Whether one of them is set, even to ""."""
        return any(name in self._environ for name in names)

    def require(self, *names: str) -> None:
        """Raise unless all of them are set."""
        missing = [name for name in names if not self._environ.get(name)]
        if missing:
            there = [name for name in names if name not in missing]
            beside = f", but {', '.join(there)} {_is_or_are(there)}" if there else ""
            raise self.error(
                f"{', '.join(missing)} {_is_or_are(missing)} not set{beside}."
            )

    def get(self, name: str) -> str:
        """Return its value, "" if it is not set."""
        return self._environ.get(name, "").strip()

    def number(self, name: str, *, least: int = 0) -> int:
        """Return a whole number that is not below `least`."""
        text = self.get(name)
        if not (text.isdecimal() and text.isascii() and len(text) <= 9):
            raise self.error(f"{name} is {text!r}, which is not a number.")
        if int(text) < least:
            raise self.error(f"{name} is {text}; it must be at least {least}.")
        return int(text)

    def below(self, name: str, limit: str) -> int:
        """Return the integer in variable `name`.

        It must be from 0 to one less than the integer in variable `limit`.
        """
        number, end = self.number(name), self.number(limit, least=1)
        if number >= end:
            raise self.error(
                f"{name} is {number}; with {limit}={end} it is at most {end - 1}."
            )
        return number

    def error(self, what: str) -> UsageError:
        """Return the error for missing or contradicting variables."""
        return UsageError(
            f"Inside {self.system}: {what}",
            f"Set the variables as {self.system} does on every node; or write --on none, which ignores {self.system}.",
        )


def _is_or_are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def anonymous(first: str, count: int) -> tuple[str, ...]:
    """Return names for nodes of which only the first has a known name."""
    return (first, *(f"node {number}" for number in range(1, count)))
