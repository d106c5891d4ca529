"""A finding of the doctor, and a host as the doctor has found it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from distmagic.errors import DistmagicError
from distmagic.remote.wire.protocol import Examined, Facts

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - its name, nothing is written there
Level = Literal["error", "warning"]
ANSWERS = ("open", "half", "refused", "silent", "no route", "no name", "another")
ANY_PORT = 0  # in place of the one that happened to be free


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with `host`. An "error" ends a run there; with a "warning" it may fail, or be slow.

    `check` names for programs what was looked at. `evidence` are sentences that say what was seen there, and `cure` is what
    to do: a command to paste, or advice.
    """

    level: Level
    host: str
    check: str
    evidence: str
    cure: str


@dataclass(frozen=True, kw_only=True)
class Unreached:
    """A host that gave no answer, and why."""

    name: str
    error: DistmagicError


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A host by its answers.

    `by_hand` begins a command that runs something there. `clock_s` are the least and the most seconds that its clock can be
    ahead of some clock that is the same for all hosts. `dials` has what it found behind the doors of others, by host and port, as
    `distmagic.remote.checkup.doors` words it, and `named_ports` those that the user has named for a run.
    """

    name: str
    by_hand: str
    python: tuple[int, ...]
    facts: Facts
    examined: Examined
    clock_s: tuple[float, float] = (0.0, 0.0)
    dials: Mapping[tuple[str, int], str] = field(default_factory=dict)
    named_ports: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table: a cell a host, "" where nothing is known. `odd` are the hosts that a finding is about."""

    title: str
    cells: tuple[str, ...]
    odd: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the doctor has found on `hosts`: errors come before warnings. `alike` is what all hosts have in common.

    `square` has a line a host that dials, () where each of them reaches each. `speeds` has
    how fast pairs of hosts were, where that was measured.
    """

    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]
    table: tuple[Line, ...]
    alike: tuple[str, ...]
    square: tuple[Line, ...] = ()
    speeds: tuple[Line, ...] = ()
    took_s: float = 0.0

    @property
    def has_errors(self) -> bool:
        """Whether a run on these hosts fails."""
        return any(one.level == "error" for one in self.findings)


def odd_ones(values: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return what most hosts have, and what the others have, by host. Of equally many hosts the first one's counts."""
    usual = Counter(values.values()).most_common(1)[0][0] if values else ""
    return usual, {host: one for host, one in values.items() if one != usual}


def others_have(subjects: Sequence[Subject]) -> str:
    """Return whom the odd host is compared with; of two hosts the odd one is the second."""
    return f"{subjects[0].name} has" if len(subjects) == 2 else "the others have"


def filled(text: str, names: Mapping[str, str]) -> str:
    """Return a text with words in place of names in braces. Unlike `str.format` it takes any text, of hosts too."""
    for name, word in names.items():
        text = text.replace(f"{{{name}}}", word)
    return text
