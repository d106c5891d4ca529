"""How an allocation ends in the middle of a run, on real Slurm: each end is told as what it is, with what to do."""

from __future__ import annotations

import dataclasses
import re
import socket
import threading
from collections.abc import Callable

import pytest

from distmagic.errors import NodeLost, WorkerFailed
from distmagic.request.allocation import SlurmRequest
from distmagic.session.background import BackgroundRun
from tests.e2e.programs import count
from tests.e2e.runner import Watch, as_value, at_work
from tests.e2e.slurm_cells import ONE, TWO, failure, ours, run, state_of, submit
from tests.lab.slurm import SlurmLab, limits_memory

pytestmark = [pytest.mark.needs("lab", "slurm"), pytest.mark.usefixtures("kernel")]

OTHER = dataclasses.replace(TWO, options=(*TWO.options, ("nice", "1")))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """What ends an allocation in the middle of a run, and what is told then."""

    partition: str
    node: str
    end: Callable[[str], object]  # with the number of the job
    told: str
    hint: str


def test_a_cancel_the_time_limit_and_a_preemption(slurm):
    """Three runs at the same time: Slurm looks at time limits only every 30 s."""
    first, second = slurm.names
    others: list[str] = []

    def bring_the_limit(job: str) -> None:
        slurm.command("scontrol", "update", f"JobId={job}", "EndTime=now+1seconds")

    def cancel(job: str) -> None:
        slurm.command("scancel", job)

    def preempt(_: str) -> None:
        options = ("-N1", f"--nodelist={second}", "--exclusive", "--partition=main")
        others.append(submit(slurm, *options))

    endings = (
        Ending(
            partition="short",
            node=first,
            end=bring_the_limit,
            told="reached its time limit.",
            hint="--time 2:00:00",
        ),
        Ending(
            partition="main",
            node=first,
            end=cancel,
            told="was cancelled with scancel, not by this notebook.",
            hint="Ask whoever did",
        ),
        Ending(
            partition="low",
            node=second,
            end=preempt,
            told="was preempted: a job that may take its nodes has come.",
            hint="whose jobs are not preempted",
        ),
    )
    runs = [begun(slurm, ending) for ending in endings]
    for _, is_at_work in runs:
        assert is_at_work.wait(120.0)
    # Each is alone in its partition until a job comes that preempts one.
    jobs = [job_in(slurm, ending.partition) for ending in endings]
    for ending, job in zip(endings, jobs, strict=True):
        ending.end(job)
    for ending, job, (background, _) in zip(endings, jobs, runs, strict=True):
        with pytest.raises(NodeLost) as caught:
            background.wait(240.0)
        assert f"Slurm job {job} {ending.told}" in caught.value.message
        assert ending.hint in caught.value.hint
    slurm.command("scancel", *others)


def begun(slurm: SlurmLab, ending: Ending) -> tuple[BackgroundRun, threading.Event]:
    """Begin a run that goes on until its allocation is ended; the event says that it is at work."""
    is_at_work = threading.Event()
    place = (("partition", ending.partition), ("nodelist", ending.node))
    request = dataclasses.replace(ONE, options=(*place, *ONE.options))
    screen = Watch(at_work(1), is_at_work.set)
    return run_in_background(slurm, request, screen), is_at_work


def job_in(slurm: SlurmLab, partition: str) -> str:
    """Return the number of the only job of a partition."""
    (job,) = slurm.command("squeue", "-h", "-p", partition, "-o", "%i").split()
    return job


def run_in_background(
    slurm: SlurmLab, request: SlurmRequest, screen: Watch, **options: object
) -> BackgroundRun:
    """Begin a run that does not end by itself."""
    found = run(
        slurm, as_value(count), 600.0, allocation=request, screen=screen, background=True, **options
    )  # fmt: skip
    assert isinstance(found, BackgroundRun)
    return found


def test_a_node_that_loses_its_power_ends_an_allocation_unless_its_job_is_elastic(
    slurm,
):
    """Two runs at the same time, each in an allocation of its own on both nodes."""
    is_at_work = threading.Event()
    fixed = run_in_background(
        slurm, OTHER, Watch(at_work(2), is_at_work.set), node_lost_after_s=60.0
    )
    assert is_at_work.wait(120.0)
    (first,) = slurm.jobs()
    second: list[str] = []

    def switch_off() -> None:
        second.extend(job for job in slurm.jobs() if job != first)
        slurm.switch_off(slurm.nodes[1])

    screen = Watch(at_work(2), switch_off)
    found = run(
        slurm, as_value(count), 4.0, nnodes=(1, 2), max_restarts=2, node_lost_after_s=4.0, screen=screen
    )  # fmt: skip
    assert dict(found.results) == {0: 40}
    (job,) = second
    assert state_of(slurm, job) == "RUNNING", "--no-kill keeps what is left"
    again = run(slurm, socket.gethostname, nnodes=(1, 2))
    assert dict(again.results) == {0: "dm2"}

    with pytest.raises(NodeLost) as caught:
        fixed.wait(120.0)
    message = caught.value.message
    assert f"Slurm job {first} lost a node" in message
    assert "Run the cell again" in caught.value.hint
    assert state_of(slurm, first) == "NODE_FAIL"
    assert slurm.jobs() == (job,)


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
def test_a_rank_that_needs_more_memory_than_the_job_has(slurm):
    request = dataclasses.replace(TWO, options=(("mem", "700M"), *TWO.options))
    error = failure(slurm, as_value(fill_memory), allocation=request)
    assert isinstance(error, WorkerFailed)
    told = r"rank 1 \(\S+, local_rank 0\) was ended by signal 9 \(SIGKILL: it reached its memory limit of [\d.]+ GB \(.*\)\)\."
    assert re.fullmatch(told, error.message), error.message
    assert "Ask Slurm for more: --mem" in error.hint


@pytest.mark.skipif(not limits_memory(), reason="Slurm can't limit memory here")
def test_a_keeper_that_is_killed_for_want_of_memory(slurm):
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
    assert f"Slurm job {jobs[0]} used more memory" in error.message
    assert "--mem 64G" in error.hint
    _a_minute_later(slurm)
    found = run(slurm, as_value(count), 0.1)
    assert found.state.phase == "done"


def _a_minute_later(slurm: SlurmLab) -> None:
    """Have what killed agents left be older than it is: the next connection removes what has been still for ten seconds."""
    for host in slurm.nodes:
        host.exec(["sh", "-c", "touch -c -d '1 minute ago' /tmp/distmagic-*"])
