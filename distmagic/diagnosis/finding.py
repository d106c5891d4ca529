"""A finding of the doctor, and a host's answers to it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distmagic.errors import DistmagicError
from distmagic.remote.frozen import frozen
from distmagic.remote.wire.protocol import Examined, Facts
from distmagic.request.hosts import pasted

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - its name, nothing is written there
Level = Literal["error", "warning"]
ANSWERS = ("open", "half", "refused", "silent", "no route", "no name", "another")
ANY_PORT = 0  # instead of a free port's number
MEMORY = "memory of GPU"  # the start of its checks
NCCL = "NCCL"  # the check of what NCCL reports of a running job


@dataclass(frozen=True)
class Finding:
    """A fault of a host."""

    level: Level  # "error" makes a run fail; with a "warning" it may fail, or be slow
    host: str
    check: str  # identifies the check for programs
    evidence: str  # sentences about what was observed
    cure: str  # a command to paste, or advice


@frozen
class Unreached:
    """A host that gave no answer, with the reason."""

    name: str
    error: DistmagicError


@frozen
class Subject:
    """A host with its answers."""

    name: str
    by_hand: str  # the start of a command that runs a program on it
    python: tuple[int, ...]
    facts: Facts
    examined: Examined
    # min and max of its clock minus the notebook machine's
    clock_s: tuple[float, float] = (0.0, 0.0)
    # results of its connections to other hosts, by host and port, in the words of
    # `distmagic.remote.checkup.doors`
    dials: Mapping[tuple[str, int], str] = field(default_factory=dict)
    named_ports: tuple[int, ...] = ()  # those that the user has named for a run

    @property
    def as_root(self) -> str:
        """The start of a command that runs a program on it as root. sudo needs a terminal to ask
        for a password.
        """
        if self.examined.is_root:
            return self.by_hand
        program, _, way = self.by_hand.partition(" ")
        terminal = " -t" if program.rpartition("/")[2] == "ssh" else ""
        command = f"{program}{terminal} {way}".rstrip()
        return re.sub(r"(?<!\S)srun ", "srun --pty ", command, count=1) + " sudo"

    def pasted(self, word: str) -> str:
        """Return a word of a command that runs on it, with the quotes for all shells on the way."""
        return pasted(self.by_hand, word)

    @property
    def card(self) -> str:
        """The network interface that leads to other hosts, as a word of a command."""
        return self.pasted(self.examined.route.interface)


@frozen
class Line:
    """One line of a table: a cell for each host, by its name; "" or none if unknown.

    `odd` are the hosts with a finding.
    """

    title: str
    cells: Mapping[str, str]
    odd: frozenset[str] = frozenset()


@frozen
class Diagnosis:
    """The doctor's findings on some hosts."""

    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]  # errors come before warnings
    table: tuple[Line, ...]
    alike: tuple[str, ...]  # properties that all hosts have in common
    # a line for each connecting host, () if all reach each other
    square: tuple[Line, ...] = ()
    speeds: tuple[Line, ...] = ()  # measured speeds of pairs of hosts
    subjects: tuple[Subject, ...] = ()  # the hosts that have answered
    took_s: float = 0.0

    @property
    def has_errors(self) -> bool:
        """Whether a run on these hosts would fail."""
        return any(one.level == "error" for one in self.findings)


def is_loopback(address: str) -> bool:
    """Whether only the host itself can connect to an address."""
    return address.startswith("127.") or address == "::1"


def odd_ones(
    values: Mapping[str, str], rank: Callable[[str, int], Any]
) -> tuple[str, dict[str, str]]:
    """Return the usual value, and those of the other hosts, by host.

    `rank` is called with a value and its number of hosts: the value with the highest rank is the
    usual one. In a tie it is the first host's.
    """
    counts = Counter(values.values())
    usual = max(counts, key=lambda one: rank(one, counts[one]), default="")
    return usual, {host: one for host, one in values.items() if one != usual}


def others_have(values: Mapping[str, str], usual: str) -> str:
    """Return the hosts with the usual value, with which an odd one is compared."""
    have = [host for host, value in values.items() if value == usual]
    if len(have) == 1:
        return f"{have[0]} has"
    if len(have) == len(values) - 1:
        return "the others have"
    return f"{len(have)} hosts have"
