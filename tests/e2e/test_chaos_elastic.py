"""An elastic job, all of whose hosts but the first are hit at random: it goes on, is whole again, and counts every step once.

Begin with an episode, and begin new ones for so long: the same variables as for test_chaos.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from distmagic.errors import DistmagicError
from distmagic.runner.outcome import Run
from distmagic.state.model import RunState
from tests.e2e import faults, runner
from tests.e2e.chaos import SECONDS, SEED, Strike, Weather, strike, strikes_of
from tests.e2e.runner import as_value
from tests.lab import Lab

SHARE = 10  # of the time that the chaos of whole jobs has
LONGEST_S = 6.0  # that a host is out of reach, stands still or is switched off; it is lost after LOST_S
LOST_S = 3.0
WEATHER = Weather(  # from when all ranks work
    counts=(1, 2, 3),
    kinds=("kill",) * 4 + ("stop",) * 2 + ("cut",) * 2 + ("freeze", "switch off", "switch off"),
    hosts=("dm2", "dm3"),
    within_s=8.0,
    longest_s=LONGEST_S,
)
EPISODE_S = 150.0

pytestmark = [pytest.mark.needs("lab"), pytest.mark.timeout(SECONDS / SHARE + EPISODE_S + 60)]


def train_until_enough() -> dict[str, Any]:
    """Count together from the last snapshot on, until somebody finds a file `enough` in its home."""
    import time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    import distmagic
    from distmagic import checkpoint

    dist.init_process_group("gloo")
    state = checkpoint.load("snapshot.pt") or {"step": 0, "sum": torch.zeros(1)}
    step, total, is_enough = state["step"], state["sum"], False
    while not is_enough:
        told = torch.tensor([1.0, float(Path("~/enough").expanduser().exists())])
        dist.all_reduce(told)
        is_enough = bool(told[1])
        step, total = step + 1, total + told[:1] / dist.get_world_size()
        distmagic.report(step=step, world=dist.get_world_size())
        checkpoint.save({"step": step, "sum": total}, "snapshot.pt", step=step)
        time.sleep(0.05)
    dist.destroy_process_group()
    return {"steps": step, "sum": float(total)}


class Storm(runner.Watch):
    """Brings strikes about from when all ranks work, cures them, and says enough when all work once more."""

    def __init__(self, lab: Lab, strikes: list[Strike]) -> None:
        super().__init__()
        self._lab, self._strikes = lab, list(strikes)
        self._due: list[tuple[float, Callable[[], object]]] = []
        self._began: float | None = None
        self._whole_at: float | None = None
        self.hits: list[Strike] = []
        self.worlds: list[int] = []

    def show(self, state: RunState) -> None:
        """Do what is due."""
        super().show(state)
        if state.world_size and self.worlds[-1:] != [state.world_size]:
            self.worlds.append(state.world_size)
        if self._began is None and is_whole(state):
            self._began = time.monotonic()
        if self._began is not None:
            self._go_on(time.monotonic() - self._began)
            if not self._strikes and not self._due:
                self._end_if_whole(state)

    def _go_on(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            self._due.pop(0)[1]()
        while self._strikes and self._strikes[0].at_s <= now_s:
            self._hit(self._strikes.pop(0), now_s)

    def _hit(self, one: Strike, now_s: float) -> None:
        host = faults.host_of(self._lab, one.host)
        cure = strike(host, one)
        if cure is None:
            return
        self.hits.append(one)
        back: Callable[[], object] = host.start if one.kind == "switch off" else cure
        self._due = sorted([*self._due, (now_s + one.lasts_s, back)], key=lambda entry: entry[0])

    def _end_if_whole(self, state: RunState) -> None:
        """Say enough once all three have worked for a second after the last cure."""
        if not is_whole(state):
            self._whole_at = None
        elif self._whole_at is None:
            self._whole_at = time.monotonic()
        elif time.monotonic() - self._whole_at > 1.0:
            (self._lab.hosts[0].home / "enough").touch()


def is_whole(state: RunState) -> bool:
    """Whether all three hosts work together."""
    ranks = [worker for worker in state.workers.values() if worker.phase == "running" and worker.step]
    return state.world_size == 3 and len(ranks) == 3 and not any(node.broken for node in state.nodes)


def one_episode(lab: Lab, seed: int) -> str:
    """Run a job through a storm; return in words what happened."""
    lab.mend()
    storm = Storm(lab, strikes_of(random.Random(seed), WEATHER))
    way = runner.access(lab, connect_timeout_s=2.0)
    outcome = "done"
    try:
        run = runner.run(
            lab, "dm1:1,dm2:1,dm3:1", as_value(train_until_enough), screen=storm, access=way, nnodes=(1, 3),
            max_restarts=50, node_lost_after_s=LOST_S, timeout_s=EPISODE_S,
        )  # fmt: skip
        check(run, storm)
    except (AssertionError, DistmagicError) as error:
        outcome = f"{type(error).__name__}: {error}"
    hits = "; ".join(map(str, storm.hits)) or "nothing"
    words = f"DISTMAGIC_CHAOS_SEED={seed}: hit by {hits}: worlds {storm.worlds}: {outcome}"
    assert outcome == "done", words
    return words


def check(run: Run, storm: Storm) -> None:
    """Assert that every step was made once, and that all three were there in the end."""
    assert run.state.phase == "done"
    assert sorted(run.results) == [0, 1, 2]
    assert all(result["sum"] == result["steps"] for result in run.results.values())
    assert storm.worlds[-1] == 3


def test_an_elastic_job_goes_on_whatever_is_hit(lab: Lab) -> None:
    end, seed, done = time.monotonic() + SECONDS / SHARE, SEED, []
    while time.monotonic() < end:
        done.append(one_episode(lab, seed))
        print(done[-1])  # shown where it fails, or with -s
        seed += 1
    assert done
