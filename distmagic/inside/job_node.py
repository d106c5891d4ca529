"""Where this process is among the nodes of a job, and how variables are read that say so. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distmagic.errors import UsageError

_FIRST_PORT, _PORTS = 20_000, 10_000
_CANDIDATES = 8


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """One rank, of a job that starts one process a rank. The names are torch's own, `said_by` the variables that say so."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    said_by: str


@dataclass(frozen=True, kw_only=True)
class JobNode:
    """One process among those that a system starts on all nodes of a job.

    `system` is the system and its job in words: "Slurm job 123". `key` is the same on all nodes of one job, and another
    one in any other job. Node 0 is dialled at `lead`, a name or an address. `names` are all nodes, in order, as messages
    call them. `task` is the rank that this process is, None where there is one process a node.
    """

    system: str
    key: str
    node_rank: int
    lead: str
    names: tuple[str, ...]
    task: RankTask | None = None

    @property
    def nnodes(self) -> int:
        """How many nodes the job has."""
        return len(self.names)

    @property
    def words(self) -> str:
        """What is told of it: "inside Slurm job 123, node 1 of 2"."""
        return f"inside {self.system}, node {self.node_rank} of {self.nnodes}"

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports of node 0 at which it may listen, the same on all nodes: it takes the first that is free."""
        found = []
        for number in range(_CANDIDATES):
            digest = hashlib.sha256(f"{self.key} {number}".encode()).digest()
            found.append(_FIRST_PORT + int.from_bytes(digest[:4], "big") % _PORTS)
        return tuple(dict.fromkeys(found))


class Variables:
    """The variables of one system. What is missing or wrong raises `UsageError` that names the variable."""

    def __init__(self, system: str, environ: Mapping[str, str]) -> None:
        self.system = system
        self._environ = environ

    def has_any(self, *names: str) -> bool:
        """Whether one of them is set, to "" or anything else."""
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
        """Return its value, "" where it is not set."""
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
        """Return a number that counts from 0, and is below the number of another variable."""
        number, end = self.number(name), self.number(limit, least=1)
        if number >= end:
            raise self.error(
                f"{name} is {number}; with {limit}={end} it is at most {end - 1}."
            )
        return number

    def error(self, what: str) -> UsageError:
        """Return the error of variables that say nothing, or several things."""
        return UsageError(
            f"Inside {self.system}: {what}",
            f"Set the variables as {self.system} does on every node; or write --on none, which ignores {self.system}.",
        )


def _is_or_are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def anonymous(first: str, count: int) -> tuple[str, ...]:
    """Return names of nodes of which only the first has one."""
    return (first, *(f"node {number}" for number in range(1, count)))
