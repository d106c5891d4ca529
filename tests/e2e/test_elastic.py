"""Elastic jobs: a host that is lost shrinks the world, one that comes back grows it, and training goes on from its snapshot."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import distmagic
from distmagic.api import session
from distmagic.errors import Unreachable, UsageError
from distmagic.outcome.detached import Detached
from distmagic.outcome.run import Run
from distmagic.planning.jobs import known_whereabouts, whereabouts
from distmagic.render.overview import overview
from distmagic.request.hosts import parse_hosts
from distmagic.state.model import RunState
from tests.e2e import faults, runner
from tests.e2e.runner import as_value, reach
from tests.lab import Lab, LabHost
from tests.lab.waiting import wait_until

pytestmark = pytest.mark.needs("lab")

LOST_S = 3.0

SHRINKS_AND_GROWS = pytest.mark.promise(
    "an elastic job shrinks when it loses a host and grows when the host returns"
)


def train(whole: int, full: int = 3) -> dict[str, Any]:
    """Count together, a step a tenth of a second, from the last snapshot on; return who was there at which step.

    It ends when all of the `full` world have met for the `whole`th time and have made ten steps more.
    """
    import time

    import torch
    import torch.distributed as dist

    import distmagic
    from distmagic import checkpoint

    dist.init_process_group("gloo")
    state = checkpoint.load("snapshot.pt") or {
        "step": 0,
        "worlds": [],
        "sum": torch.zeros(1),
    }
    worlds = [*state["worlds"], [state["step"], dist.get_world_size()]]
    total = state["sum"]
    met = [begun for begun, size in worlds if size == full]
    end = met[-1] + 10 if len(met) == whole else 10_000
    for step in range(state["step"], end):
        one = torch.ones(1)
        dist.all_reduce(one)
        total = total + one / dist.get_world_size()
        distmagic.report(step=step + 1, world=dist.get_world_size())
        checkpoint.save(
            {"step": step + 1, "worlds": worlds, "sum": total},
            "snapshot.pt",
            step=step + 1,
        )
        time.sleep(0.1)
    dist.destroy_process_group()
    return {"worlds": worlds, "sum": float(total), "steps": end}


class Fault(runner.Watch):
    """Cuts a host off once all of the `full` world train, and lets it come back once the others have gone on without it."""

    def __init__(self, host: LabHost, full: int) -> None:
        super().__init__()
        self.host = host
        self.full = full
        self.alerts: set[str] = set()
        self.at = "whole"
        self.broken_at_step = 0.0

    def show(self, state: RunState) -> None:
        """Do what is due."""
        super().show(state)
        self.alerts.update(
            alert.text for alert in overview(state).alerts if alert.level == "error"
        )
        step = max((worker.step or 0 for worker in state.workers.values()), default=0)
        if self.at == "whole" and state.world_size == self.full and step > 5:
            self.at, self.broken_at_step = "broken", step
            self.host.cut()
        elif (
            self.at == "broken"
            and state.world_size == self.full - 1
            and step > self.broken_at_step + 5
        ):
            self.at = "shrunk"
            self.host.heal()
        elif self.at == "shrunk" and state.world_size == self.full:
            self.at = "grown"


@pytest.mark.parametrize("full", [pytest.param(2, marks=SHRINKS_AND_GROWS), 3])
def test_lost_host_of_an_elastic_job(lab, full):
    names = [host.name for host in lab.hosts[:full]]
    seen = Fault(lab.hosts[full - 1], full)
    run = runner.run_warm(
        lab, ",".join(f"{name}:1" for name in names), train, 2, full, screen=seen, nnodes=(full - 1, full),
        max_restarts=3, node_lost_after_s=LOST_S,
    )  # fmt: skip
    session().close()
    lab.assert_clean()
    assert seen.at == "grown"
    assert run.state.phase == "done"
    assert len(run.results) == full
    worlds = run.results[0]["worlds"]
    # On a busy machine those that are left may need a second attempt.
    sizes = [size for size, _ in groupby(size for _, size in worlds)]
    assert sizes == [full, full - 1, full]
    assert all(begun > 0 for begun, _ in worlds[1:]), "from the snapshot on"
    assert run.results[0]["sum"] == run.results[0]["steps"], "every step was made once"
    assert [node.host for node in run.state.nodes] == [*names, names[-1]]
    assert all(alert.startswith(f"{names[-1]}: ") for alert in seen.alerts), (
        "ranks that are replaced are no failure"
    )
    assert len(seen.alerts) <= 1
    shown = overview(run.state)
    assert shown.facts[0] == f"{full} ranks on {', '.join(names)}"
    assert [row.host for group in shown.groups for row in group.rows] == names


class Late(runner.Watch):
    """Switches dm1 and dm3 on once dm2 trains alone, and kills the torchrun of one of them once all three do."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(
            lambda state: any((w.step or 0) > 3 for w in state.workers.values()),
            self._switch_on,
        )
        self._lab = lab
        self.killed = ""

    def _switch_on(self) -> None:
        for host in (self._lab.hosts[0], self._lab.hosts[2]):
            host.start()
        self._when, self._act = (
            lambda state: state.world_size == 3 and is_at_work(state),
            self._kill,
        )

    def _kill(self) -> None:
        assert self.last is not None
        self.killed = self.last.nodes[1].host  # whichever came first
        host = faults.host_of(self._lab, self.killed)
        host.exec(
            ["kill", "-KILL", str(faults.pids(host, "torchrun", "*")[0])]
        ).check_returncode()


def is_at_work(state: RunState) -> bool:
    """Whether all ranks of the present world have made a step."""
    ranks = [worker for worker in state.workers.values() if worker.phase == "running"]
    return len(ranks) == state.world_size and all(worker.step for worker in ranks)


def test_hosts_that_are_down_at_the_start_join_when_they_are_up_and_again_when_their_torchrun_is_killed(
    lab, golden
):
    for host in (lab.hosts[0], lab.hosts[2]):
        host.kill()
    late = Late(lab)
    run = runner.run(
        lab, "dm1:1,dm2:1,dm3:1", train, 2, screen=late, nnodes=(1, 3), max_restarts=5
    )
    worlds = [size for _, size in run.results[0]["worlds"]]
    assert (worlds[0], worlds[-1], worlds.count(3)) == (1, 3, 2), (
        "with two in between, or one who is back at once"
    )
    assert run.results[0]["sum"] == run.results[0]["steps"]
    hosts = [node.host for node in run.state.nodes]
    assert hosts[:1] + sorted(hosts[1:3]) + hosts[3:] == [
        "dm2",
        "dm1",
        "dm3",
        late.killed,
    ]
    away, killed = run.state.notices[:2], run.state.notices[2:]
    assert [notice.partition(":")[0] for notice in away] == ["dm1", "dm3"]
    golden(*away)
    (notice,) = killed
    golden(notice.replace(late.killed, "HOST"))


def wait_for_ever() -> None:
    """Be a rank that does not end by itself."""
    import time

    while True:
        time.sleep(1)


def left_alone(lab: Lab) -> Detached:
    """Leave a job alone that waits for ever, and may have a host less."""
    left = distmagic.run(
        as_value(wait_for_ever), hosts="dm1:1,dm2:1,dm3:1", nnodes=(2, 3), max_restarts=1, detach=True,
        access=runner.access(lab), screen=runner.Watch(),
    )  # fmt: skip
    assert isinstance(left, Detached)
    return left


def test_a_job_that_began_without_a_host_is_found_again_and_takes_it_in(
    lab, monkeypatch, tmp_path
):
    lab.hosts[0].kill()
    left = left_alone(lab)
    assert left.hosts == ("dm2", "dm3")
    asked = parse_hosts("dm1,dm2,dm3")
    reaching = reach(lab, asked)
    (job,) = session().housekeeping.jobs(reaching)
    assert (job.hosts, job.host_indices, job.phase, job.terms.awaited) == (
        ("dm2", "dm3"),
        (1, 2),
        "detached",
        ("dm1",),
    )
    assert list(reaching.absent) == [0]

    # Another machine: it has nothing of the job.
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))
    lab.hosts[0].start()
    told: list[tuple[str, int]] = []
    session().housekeeping.add(
        reach(lab, (asked[1], asked[0])), job, lambda *one: told.append(one)
    )
    assert told == [("dm1", 2)]
    wait_until(lambda: bool(faults.pids(lab.hosts[0], "rank", "*")), "a rank on dm1")
    with pytest.raises(UsageError, match=f"^dm1 .* {job.name}"):
        session().housekeeping.add(reach(lab, (asked[1], asked[0])), job, print)
    (job,) = session().housekeeping.jobs(reach(lab, asked))
    assert (job.hosts, job.running) == (("dm2", "dm3", "dm1"), (0, 1, 2))
    session().housekeeping.stop(reach(lab, known_whereabouts(job, asked)), job)
    lab.assert_clean()


FOLLOWER = """
import json
from distmagic.api import session
from distmagic.planning.jobs import whereabouts
from distmagic.request.hosts import parse_hosts
from distmagic.connection.prompts import NotebookAsker
from distmagic.request.access import Access
from tests.e2e import runner

way, hosts = Access(ssh_config={config!r}, warm_idle_s=0.0), parse_hosts("dm1,dm2,dm3")

def reach(hosts):
    return session().reach(hosts, way, NotebookAsker(can_ask=False))

job = session().housekeeping.jobs(reach(hosts))[-1]
run = session().attach(reach(whereabouts(job, hosts)), job, runner.Watch())
print(json.dumps([run.results[0], [node.host for node in run.state.nodes], len(run.results)]))
"""


def test_a_job_that_nobody_watches_goes_on_without_a_lost_host_and_takes_it_in_once_when_two_kernels_follow(
    lab,
):
    left = distmagic.run(
        as_value(train), 2, hosts="dm1:1,dm2:1,dm3:1", nnodes=(2, 3), max_restarts=3, node_lost_after_s=LOST_S,
        detach=True, access=runner.access(lab), screen=runner.Watch(),
    )  # fmt: skip
    assert isinstance(left, Detached)
    wait_until(
        lambda: list(lab.hosts[2].home.glob(".distmagic/work/*/snapshot.pt")),
        "the first snapshot",
    )
    lab.hosts[2].kill()
    script = FOLLOWER.format(config=str(lab.ssh_config))
    other = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        hosts = parse_hosts("dm1,dm2,dm3")
        job = session().housekeeping.jobs(reach(lab, hosts))[-1]
        seen = runner.Watch(lambda state: state.world_size == 2, lab.hosts[2].start)
        run = session().attach(reach(lab, whereabouts(job, hosts)), job, seen)
        told, _ = other.communicate(timeout=120)
    finally:
        other.kill()
    assert isinstance(run, Run)
    assert [size for _, size in run.results[0]["worlds"]] == [3, 2, 3]
    assert run.results[0]["sum"] == run.results[0]["steps"]
    assert [node.host for node in run.state.nodes] == ["dm1", "dm2", "dm3", "dm3"]
    assert json.loads(told) == [run.results[0], ["dm1", "dm2", "dm3", "dm3"], 3]
    lab.assert_clean()


@pytest.mark.quick
def test_too_few_hosts_at_the_start(lab):
    lab.hosts[1].kill()
    with pytest.raises(Unreachable, match=r"^dm2: "):
        runner.run(
            lab, "dm1:1,dm2:1", train, 99, nnodes=(2, 3), max_restarts=3,
        )  # fmt: skip
