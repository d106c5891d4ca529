"""Faults at random, again and again: whatever is hit at whatever moment, the outcome is told truthfully and nothing is left.

DISTMAGIC_CHAOS_SEED     begin with this episode (each has the number after the one before)
DISTMAGIC_CHAOS_SECONDS  begin new episodes for so long
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from distmagic.api import session
from distmagic.errors import DistmagicError
from distmagic.request.hosts import parse_hosts
from tests.e2e import fault_plays, faults, runner
from tests.e2e.chaos import SECONDS, SEED, Strike, Weather, strike, strikes_of
from tests.e2e.faults import Told, Way
from tests.e2e.runner import reach
from tests.lab import Lab
from tests.lab.waiting import wait_until

NUMBERS = 60  # three seconds of work
WAY = Way(
    numbers=NUMBERS, hosts="dm1:1,dm2:2", options={"node_lost_after_s": 8.0, "lease_s": 8.0, "connect_timeout_s": 5.0}
)

pytestmark = [pytest.mark.needs("lab"), pytest.mark.timeout(SECONDS + 180)]


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
