"""How an allocation ends in the middle of a run, on real Slurm: each end is told as what it is, with what to do."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Callable

import pytest

from distmagic.errors import DistmagicError, NodeLost, WorkerFailed
from distmagic.request.allocation import SlurmRequest
from distmagic.state.model import RunState
from tests.e2e.programs import count
from tests.e2e.runner import Watch, as_value, at_work
from tests.e2e.slurm_cells import (
    ONE,
    TWO,
    failure,
    kill,
    ours,
    run,
    state_of,
    submit,
)
from tests.lab.slurm import SlurmLab, limits_memory

pytestmark = [
    pytest.mark.needs("lab", "slurm"),
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("kernel"),
]


def ended_in_the_middle(
    slurm: SlurmLab, act: Callable[[], object], **options: object
) -> tuple[str, DistmagicError]:
    """Run a job in the middle of which `act` is called, and ends the allocation; return its number and the error.

    It has one node, where nothing else is said.
    """
    jobs: list[str] = []
    request = options.setdefault("allocation", ONE)
    assert isinstance(request, SlurmRequest)

    def see_and_act() -> None:
        jobs.extend(slurm.jobs())
        act()

    screen = Watch(at_work(request.nodes), see_and_act)
    error = failure(slurm, as_value(count), 100.0, screen=screen, **options)
    assert isinstance(error, NodeLost), error
    return jobs[0], error


def test_somebody_else_cancels_the_job(slurm: SlurmLab) -> None:
    job, error = ended_in_the_middle(
        slurm, lambda: slurm.command("scancel", *slurm.jobs())
    )
    told = f"Slurm job {job} was cancelled with scancel, not by this notebook."
    assert told in error.message
    assert "Ask whoever did" in error.hint


def test_the_time_limit(slurm: SlurmLab) -> None:
    def soon() -> None:
        (job,) = slurm.jobs()
        slurm.command("scontrol", "update", f"JobId={job}", "EndTime=now+1seconds")

    job, error = ended_in_the_middle(slurm, soon)
    assert f"Slurm job {job} reached its time limit." in error.message
    assert "--time 2:00:00" in error.hint


def test_a_preemption(slurm: SlurmLab) -> None:
    others: list[str] = []
    request = dataclasses.replace(ONE, options=(("partition", "low"), *ONE.options))
    job, error = ended_in_the_middle(
        slurm,
        lambda: others.append(submit(slurm, "--partition=main", "--exclusive")),
        allocation=request,
    )
    slurm.command("scancel", *others)
    told = f"Slurm job {job} was preempted: a job that may take its nodes has come."
    assert told in error.message
    assert "whose jobs are not preempted" in error.hint


def test_a_node_that_loses_its_power_ends_the_allocation(slurm: SlurmLab) -> None:
    job, error = ended_in_the_middle(
        slurm,
        lambda: slurm.switch_off(slurm.nodes[1]),
        allocation=TWO,
        node_lost_after_s=60.0,
    )
    assert f"Slurm job {job} lost a node: Slurm found it dead." in error.message
    assert "Run the cell again; Slurm gives other nodes." in error.hint
    assert state_of(slurm, job) == "NODE_FAIL"


def test_an_elastic_job_goes_on_without_a_node_that_lost_its_power(
    slurm: SlurmLab,
) -> None:
    class Powerless(Watch):
        def __init__(self) -> None:
            super().__init__(at_work(2), lambda: slurm.switch_off(slurm.nodes[1]))
            self.job = ""

        def show(self, state: RunState) -> None:
            self.job = self.job or "".join(slurm.jobs())
            super().show(state)

    screen = Powerless()
    found = run(
        slurm, as_value(count), 4.0, nnodes=(1, 2), max_restarts=2, node_lost_after_s=2.0, screen=screen
    )  # fmt: skip
    assert dict(found.results) == {0: 40}
    assert state_of(slurm, screen.job) == "RUNNING", "--no-kill keeps what is left"
    again = run(slurm, socket.gethostname, nnodes=(1, 2))
    assert dict(again.results) == {0: "dm2"}
    assert slurm.jobs() == (screen.job,)


def fill_memory() -> int:
    """Have rank 1 take a gigabyte, and the other wait for it."""
    import os
    import time

    import distmagic

    distmagic.report(step=1)
    while os.environ["RANK"] == "0":
        time.sleep(0.1)
    return len(b"x" * (1 << 30))


@pytest.mark.skipif(not limits_memory(), reason="Slurm can't limit memory here")
def test_a_rank_that_needs_more_memory_than_the_job_has(slurm: SlurmLab) -> None:
    request = dataclasses.replace(TWO, options=(("mem", "700M"), *TWO.options))
    error = failure(slurm, as_value(fill_memory), allocation=request)
    assert isinstance(error, WorkerFailed)
    told = r"rank 1 \(\S+, local_rank 0\) was ended by signal 9 \(SIGKILL: it reached its memory limit \(.*\)\)\."
    assert re.fullmatch(told, error.message), error.message
    assert "Ask Slurm for more: --mem" in error.hint


@pytest.mark.skipif(not limits_memory(), reason="Slurm can't limit memory here")
def test_a_keeper_that_is_killed_for_want_of_memory(slurm: SlurmLab) -> None:
    """The kernel's choice is the first keeper here; with it goes the batch script, and the job."""
    request = dataclasses.replace(TWO, options=(("mem", "700M"), *TWO.options))

    def take_the_first() -> None:
        host = slurm.nodes[0]
        (keeper,) = [one for one in ours(host, "keeper") if one.name != "srun"]
        told = f"echo 1000 > /proc/{keeper.pid}/oom_score_adj; mv go there"
        host.exec(["sh", "-c", f"touch go; {told}"]).check_returncode()

    def take_memory() -> int:
        import os
        import time
        from pathlib import Path

        import distmagic

        distmagic.report(step=1)
        while os.environ["RANK"] == "1" or not Path("~/there").expanduser().exists():
            time.sleep(0.01)
        taken = [b"x" * (50 << 20) for _ in range(20)]
        time.sleep(100)
        return len(taken)

    jobs: list[str] = []
    screen = Watch(at_work(2), lambda: (jobs.extend(slurm.jobs()), take_the_first()))
    error = failure(slurm, as_value(take_memory), allocation=request, screen=screen)
    assert (
        f"Slurm job {jobs[0]} used more memory than it had asked for." in error.message
    )
    assert "--mem 64G" in error.hint
    # Its keepers remove what the killed left.
    found = run(slurm, as_value(count), 0.1)
    assert found.state.phase == "done"


def test_the_keeper_of_a_second_node_that_is_killed_ends_the_allocation(
    slurm: SlurmLab,
) -> None:
    def kill_it() -> None:
        host = slurm.nodes[1]
        kill(host, ours(host, "keeper"))

    job, error = ended_in_the_middle(slurm, kill_it, allocation=TWO)
    assert f"Slurm job {job} failed: one of its keepers has ended." in error.message
    assert "Run the cell again" in error.hint
    found = run(slurm, as_value(count), 0.1)
    assert found.state.phase == "done", "the next cell asks for new nodes"
