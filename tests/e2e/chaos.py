"""Faults at random: what strikes when, drawn from a seed, and how it is brought about."""

from __future__ import annotations

import os
import random
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass

from tests.e2e import faults
from tests.lab import LabHost

SECONDS = float(os.environ.get("DISTMAGIC_CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("DISTMAGIC_CHAOS_SEED") or secrets.randbelow(1_000_000))
LONGEST_S = 1.5  # that anything stands still, or a cable is out


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One thing that goes wrong, `at_s` seconds after the beginning, for `lasts_s` where it is something that passes."""

    at_s: float
    kind: str  # kill or stop a process of ours; cut, freeze or switch off a host
    process: str
    host: str
    lasts_s: float

    def __str__(self) -> str:
        passes = f" for {self.lasts_s:.2f} s" if self.kind in ("stop", "cut", "freeze") else ""
        what = f"{self.process} on {self.host}" if self.process else self.host
        return f"{self.at_s:.2f} s: {self.kind} {what}{passes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What may go wrong in an episode: how many strikes, of which kinds, on which hosts, when, for how long at most.

    What stands there several times is so much likelier.
    """

    counts: tuple[int, ...] = (1, 1, 2, 3)
    kinds: tuple[str, ...] = ("kill",) * 5 + ("stop",) * 3 + ("cut",) * 3 + ("freeze", "switch off")
    hosts: tuple[str, ...] = ("dm1", "dm2")
    within_s: float = 6.0
    longest_s: float = LONGEST_S


def strikes_of(rng: random.Random, weather: Weather) -> list[Strike]:
    """Return what goes wrong in one episode, in order."""
    found = []
    for _ in range(rng.choice(weather.counts)):
        kind = rng.choice(weather.kinds)
        process = rng.choice(("rank", "torchrun", "agent", "contact", "session")) if kind in ("kill", "stop") else ""
        found.append(
            Strike(
                at_s=rng.uniform(0.0, weather.within_s), kind=kind, process=process, host=rng.choice(weather.hosts),
                lasts_s=rng.uniform(0.1, weather.longest_s),
            )
        )  # fmt: skip
    return sorted(found, key=lambda one: one.at_s)


def strike(host: LabHost, one: Strike) -> Callable[[], object] | None:
    """Do it; return what takes it back, None if there was nothing to be struck."""
    if not host.is_up:
        return None
    if one.kind == "switch off":
        host.kill(silent=one.lasts_s < LONGEST_S / 2)
        return lambda: None
    if one.kind in ("cut", "freeze"):
        host.cut() if one.kind == "cut" else host.freeze()
        back = host.heal if one.kind == "cut" else host.thaw
        return lambda: back() if host.is_up else None
    return _signal(host, one)


def _signal(host: LabHost, one: Strike) -> Callable[[], object] | None:
    found = faults.pids(host, one.process, "*")[:1]  # of two ranks the first

    def send(number: int) -> bool:
        return bool(found) and host.is_up and host.exec(["kill", f"-{int(number)}", str(found[0])]).returncode == 0

    has_hit = send(signal.SIGKILL if one.kind == "kill" else signal.SIGSTOP)
    return (lambda: send(signal.SIGCONT)) if has_hit else None
