"""Elastic jobs: a host that is lost shrinks the world, one that comes back grows it, and training goes on from its snapshot."""

from __future__ import annotations

from typing import Any

import pytest

import distmagic
from distmagic.api import session
from distmagic.errors import NodeLost, Unreachable
from distmagic.found import known_whereabouts
from distmagic.hosts import parse_hosts
from distmagic.outcome import Detached, Run
from distmagic.render.overview import overview
from distmagic.state import RunState
from tests.e2e import runner
from tests.e2e.test_jobs import reach
from tests.e2e.test_runs import as_value
from tests.lab import Lab, LabHost
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.needs("lab"), pytest.mark.timeout(180)]

LOST_S = 3.0
FAULTS = {
    "cut": (LabHost.cut, LabHost.heal),
    "power off": (LabHost.kill, LabHost.start),
    "frozen": (LabHost.freeze, LabHost.thaw),
}


def train(steps: int) -> dict[str, Any]:
    """Count together, a step a tenth of a second, from the last snapshot on; return who was there at which step."""
    import time

    import torch
    import torch.distributed as dist

    import distmagic
    from distmagic import checkpoint

    dist.init_process_group("gloo")
    state = checkpoint.load("snapshot.pt") or {"step": 0, "worlds": [], "sum": torch.zeros(1)}
    worlds = [*state["worlds"], [state["step"], dist.get_world_size()]]
    total = state["sum"]
    for step in range(state["step"], steps):
        one = torch.ones(1)
        dist.all_reduce(one)
        total = total + one / dist.get_world_size()
        distmagic.report(step=step + 1, total=steps, world=dist.get_world_size())
        checkpoint.save({"step": step + 1, "worlds": worlds, "sum": total}, "snapshot.pt", step=step + 1)
        time.sleep(0.1)
    dist.destroy_process_group()
    return {"worlds": worlds, "sum": float(total)}


class Fault(runner.Watch):
    """Breaks dm3 once all three train, and lets it come back once two have gone on without it."""

    def __init__(self, lab: Lab, kind: str, *, comes_back: bool) -> None:
        super().__init__()
        self.lab, self.comes_back = lab, comes_back
        self.harm, self.cure = FAULTS[kind]
        self.alerts: set[str] = set()
        self.at = "whole"
        self.broken_at_step = 0.0
        self.shrunk_s = self.grown_s = 0.0

    def show(self, state: RunState) -> None:
        """Do what is due."""
        super().show(state)
        self.alerts.update(alert.text for alert in overview(state).alerts if alert.level == "error")
        host = self.lab.hosts[2]
        step = max((worker.step or 0 for worker in state.workers.values()), default=0)
        if self.at == "whole" and state.world_size == 3 and step > 5:
            self.at, self.broken_at_step, self.shrunk_s = "broken", step, -state.at_s
            self.harm(host)
        elif self.at == "broken" and state.world_size == 2 and step > self.broken_at_step + 5:
            self.at, self.grown_s = "shrunk", -state.at_s
            self.shrunk_s += state.at_s
            if self.comes_back:
                self.cure(host)
        elif self.at == "shrunk" and state.world_size == 3:
            self.at = "grown"
            self.grown_s += state.at_s


@pytest.mark.parametrize("kind", FAULTS)
def test_a_lost_host_shrinks_the_world_and_grows_it_when_it_comes_back(lab: Lab, kind: str) -> None:
    seen = Fault(lab, kind, comes_back=True)
    way = runner.access(lab, connect_timeout_s=2.0)
    run = runner.run(
        lab, "dm1:1,dm2:1,dm3:1", as_value(train), 200, screen=seen, access=way, nnodes=(2, 3), max_restarts=3,
        node_lost_after_s=LOST_S,
    )  # fmt: skip
    assert seen.at == "grown"
    assert run.state.phase == "done"
    assert len(run.results) == 3
    worlds = run.results[0]["worlds"]
    assert [size for _, size in worlds] == [3, 2, 3]
    assert all(begun > 0 for begun, _ in worlds[1:]), "from the snapshot on"
    assert run.results[0]["sum"] == 200.0, "every step was made once"
    assert [node.host for node in run.state.nodes] == ["dm1", "dm2", "dm3", "dm3"]
    assert seen.alerts <= {"dm3: the other hosts have not heard of it any more"}, (
        "ranks that are replaced are no failure"
    )
    shown = overview(run.state)
    assert shown.facts[0] == "3 ranks on dm1, dm2, dm3"
    assert [row.host for group in shown.groups for row in group.rows] == ["dm1", "dm2", "dm3"]


class Late(runner.Watch):
    """Switches dm1 on once the two others train."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lambda state: any((w.step or 0) > 5 for w in state.workers.values()), lab.hosts[0].start)


def test_a_host_that_is_down_at_the_start_joins_when_it_is_up(lab: Lab) -> None:
    lab.hosts[0].kill()
    way = runner.access(lab, connect_timeout_s=2.0)
    run = runner.run(
        lab, "dm1:1,dm2:1,dm3:1", as_value(train), 150, screen=Late(lab), access=way, nnodes=(2, 3), max_restarts=3
    )
    assert [size for _, size in run.results[0]["worlds"]] == [2, 3]
    assert run.results[0]["sum"] == 150.0
    assert [node.host for node in run.state.nodes] == ["dm2", "dm3", "dm1"]
    assert run.state.notices == (
        "dm1: no answer from 10.99.0.11 port 22 within 2 s. The run begins without this host.",
    )


def wait_for_ever() -> None:
    """Be a rank that does not end by itself."""
    import time

    while True:
        time.sleep(1)


def test_a_job_that_began_without_a_host_is_found_again(lab: Lab) -> None:
    lab.hosts[0].kill()
    left = distmagic.run(
        as_value(wait_for_ever), hosts="dm1:1,dm2:1,dm3:1", nnodes=(2, 3), max_restarts=1, detach=True,
        access=runner.access(lab, connect_timeout_s=2.0), screen=runner.Watch(),
    )  # fmt: skip
    assert isinstance(left, Detached)
    assert left.hosts == ("dm2", "dm3")
    asked = parse_hosts("dm1,dm2,dm3")
    reaching = reach(lab, asked, connect_timeout_s=2.0)
    (job,) = session().jobs(reaching)
    assert (job.hosts, job.places, job.phase) == (("dm2", "dm3"), (1, 2), "detached")
    assert list(reaching.absent) == [0]
    session().stop(reach(lab, known_whereabouts(job, asked)), job)
    lab.assert_clean()


def test_a_job_that_nobody_watches_goes_on_without_a_lost_host(lab: Lab) -> None:
    left = distmagic.run(
        as_value(train), 100, hosts="dm1:1,dm2:1,dm3:1", nnodes=(2, 3), max_restarts=3, node_lost_after_s=LOST_S,
        detach=True, access=runner.access(lab, connect_timeout_s=2.0), screen=runner.Watch(),
    )  # fmt: skip
    assert isinstance(left, Detached)
    wait_until((lab.hosts[2].home / "snapshot.pt").exists, "the first snapshot", 60)
    lab.hosts[2].kill()
    run = left.attach()  # from the first event on, as if it had watched; one of the job's hosts is down
    assert isinstance(run, Run)
    assert [size for _, size in run.results[0]["worlds"]] == [3, 2]
    assert run.results[0]["sum"] == 100.0
    lab.assert_clean()


def test_too_few_hosts_at_the_start(lab: Lab) -> None:
    lab.hosts[1].kill()
    with pytest.raises(Unreachable, match=r"^dm2: no answer"):
        runner.run(
            lab, "dm1:1,dm2:1", as_value(train), 60, nnodes=(2, 3), max_restarts=3,
            access=runner.access(lab, connect_timeout_s=2.0),
        )  # fmt: skip


def test_too_few_hosts_end_an_elastic_job(lab: Lab) -> None:
    error = runner.failure(
        lab, "dm1:1,dm2:1,dm3:1", as_value(train), 600, screen=Both(lab), nnodes=(2, 3), max_restarts=3,
        node_lost_after_s=LOST_S,
    )  # fmt: skip
    assert isinstance(error, NodeLost)


class Both(runner.Watch):
    """Cuts dm2 and dm3 once all three train."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lambda state: any((w.step or 0) > 3 for w in state.workers.values()), lambda: _cut(lab))


def _cut(lab: Lab) -> None:
    for host in lab.hosts[1:3]:
        host.cut()
