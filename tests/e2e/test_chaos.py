"""Faults at random, again and again: whatever is hit at whatever moment, the outcome is told truthfully and nothing is left.

DISTMAGIC_CHAOS_SEED     begin with this episode (each has the number after the one before)
DISTMAGIC_CHAOS_SECONDS  begin new episodes for so long
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from distmagic.api import session
from distmagic.errors import DistmagicError
from distmagic.request.hosts import parse_hosts
from tests.e2e import fault_plays, faults, runner
from tests.e2e.faults import Told, Way
from tests.e2e.test_jobs import reach
from tests.lab import Lab, LabHost
from tests.lab.waiting import wait_until

SECONDS = float(os.environ.get("DISTMAGIC_CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("DISTMAGIC_CHAOS_SEED") or secrets.randbelow(1_000_000))
NUMBERS = 60  # three seconds of work
LONGEST_S = 1.5  # that anything stands still, or a cable is out
WAY = Way(
    numbers=NUMBERS, hosts="dm1:1,dm2:2", options={"node_lost_after_s": 8.0, "lease_s": 8.0, "connect_timeout_s": 5.0}
)

pytestmark = [pytest.mark.needs("lab"), pytest.mark.timeout(SECONDS + 180)]


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


class Storm:
    """Brings strikes about, on a thread of its own, and cures what passes. `hits` are those that found their aim."""

    def __init__(self, lab: Lab, strikes: list[Strike]) -> None:
        self._lab, self._over, self._began = lab, threading.Event(), time.monotonic()
        self._strikes = strikes
        self._cures: list[tuple[float, Callable[[], object]]] = []
        self._thread = ThreadPoolExecutor(1)
        self.hits: list[Strike] = []

    def __enter__(self) -> Storm:  # noqa: PYI034 - typing.Self is of Python 3.11
        self._blowing = self._thread.submit(self._blow)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.shutdown()
        self._blowing.result()

    def _blow(self) -> None:
        """Do what is due, in order; when the run is over, cure at once what is left to be cured."""
        for one in self._strikes:
            self._cure_until(one.at_s)
            if not self._over.is_set() and (cure := strike(faults.host_of(self._lab, one.host), one)) is not None:
                self.hits.append(one)
                self._cures.append((one.at_s + one.lasts_s, cure))
        self._cure_until(math.inf)

    def _cure_until(self, at_s: float) -> None:
        for due_s, cure in sorted(self._cures, key=lambda entry: entry[0]):
            if due_s > at_s:
                break
            self._wait(due_s)
            cure()
            self._cures.remove((due_s, cure))
        if at_s < math.inf:
            self._wait(at_s)

    def _wait(self, at_s: float) -> None:
        self._over.wait(max(0.0, at_s - (time.monotonic() - self._began)))


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


def is_harmless(strike: Strike, began_s: float) -> bool:
    """Whether a run must survive it: a connection of the notebook's that breaks, or what passes, once all ranks work."""
    return strike.at_s > began_s and (
        strike.kind in ("cut", "freeze", "stop") or strike.process in ("contact", "session")
    )


def check(told: Told, hits: list[Strike], began_s: float) -> None:
    """Assert that what was told can be true: it is done, or something failed that was struck."""
    if told.outcome.split(";")[0] == "done":
        assert set(told.results) == {"0", "1", "2"}
        assert set(told.results.values()) == {NUMBERS}
        assert all(one.is_whole and len(one.lines) == NUMBERS for one in told.ranks)
        return
    assert not all(is_harmless(one, began_s) for one in hits), "nothing happened that could end a run"
    assert any(one.host in told.outcome for one in hits), "it names none of the hosts that were struck"


class Beginning(runner.Watch):
    """A screen that notes when all ranks are at work, in seconds of its own clock; `inf`: never."""

    def __init__(self) -> None:
        super().__init__(lambda state: faults.training(state, 0.0), self._note)
        self._began, self.at_work_s = time.monotonic(), math.inf

    def _note(self) -> None:
        self.at_work_s = time.monotonic() - self._began


def assert_nothing_is_left(lab: Lab, hits: list[Strike]) -> None:
    """Wait until all hosts are clean. Where an agent was killed on a host that then was out of reach, somebody must look in."""
    if not any(one.process == "agent" for one in hits):
        lab.assert_clean(30.0)
        return

    def is_clean() -> bool:
        if fault_plays.is_clean(lab):
            return True
        for host in lab.hosts:
            with contextlib.suppress(DistmagicError):
                session().jobs(reach(lab, parse_hosts(host.name)))
        return fault_plays.is_clean(lab)

    wait_until(is_clean, "clean hosts", 30.0)
    lab.assert_clean(0.0)


def one_episode(lab: Lab, seed: int) -> str:
    """Run a job through a storm; return in words what happened."""
    lab.mend()
    session().close()
    screen = Beginning()
    with Storm(lab, strikes_of(random.Random(seed), Weather())) as storm:
        told = faults.told_of(lambda: faults.start(lab, WAY, screen))
    hits = storm.hits
    words = f"DISTMAGIC_CHAOS_SEED={seed}: hit by {'; '.join(map(str, hits)) or 'nothing'}: {told.outcome}"
    try:
        check(told, hits, screen.at_work_s)
        faults.assert_read_once(lab, told)
        assert_nothing_is_left(lab, hits)
    except AssertionError as error:
        raise AssertionError(f"{words}\n{error}") from error
    return words


def test_whatever_is_hit_at_whatever_moment(lab: Lab) -> None:
    end, seed, done = time.monotonic() + SECONDS, SEED, []
    while time.monotonic() < end:
        done.append(one_episode(lab, seed))
        print(done[-1])  # shown where it fails, or with -s
        seed += 1
    assert done
