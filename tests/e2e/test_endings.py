"""Runs that end badly, beside those of the fault table, and what is left on the hosts: nothing."""

from __future__ import annotations

import signal

import pytest

from distmagic.errors import Cancelled, PreflightError, TimedOut, WorkerFailed
from tests.e2e import runner
from tests.e2e.programs import stubborn
from tests.e2e.runner import at_work

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]


@pytest.mark.promise("the first rank that fails stops all hosts")
def test_first_failure_stops_all_hosts(lab):
    error = runner.failure(lab, "dm1:2,dm2:1", stubborn, env={"FAILS": "2"})
    assert isinstance(error, WorkerFailed)
    assert error.message == "rank 2 (dm2, local_rank 0) raised ValueError: enough"
    assert 'raise ValueError("enough")' in error.remote_traceback
    assert "distmagic" not in error.remote_traceback.replace(
        "import distmagic", ""
    ).replace("distmagic.report", "")
    others = [
        worker.phase for worker in error.run.state.workers.values() if worker.rank != 2
    ]
    assert set(others) <= {"stopped"}  # those that were up already


def test_a_rank_that_fails_does_its_last_things_while_the_run_is_stopped(warm_lab):
    """As with torchrun alone, which waits for the process of a rank that has failed."""

    def fail() -> None:
        import atexit
        import os
        import subprocess
        import time

        def save() -> None:
            time.sleep(1.0)
            child = subprocess.Popen(["sleep", "100"])
            child.terminate()
            print("saved, and a child ended:", child.wait(), flush=True)

        if os.environ["RANK"] == "1":
            atexit.register(save)
            raise ValueError("enough")
        time.sleep(1000)

    error = runner.failure_warm(warm_lab, "dm1:1,dm2:1", fail)
    assert error.message == "rank 1 (dm2, local_rank 0) raised ValueError: enough"
    assert "saved, and a child ended: -15\n" in error.run.logs(1)


def test_an_interrupt_lets_a_rank_save_while_one_of_another_host_waits_for_it(warm_lab):
    """It takes longer than ranks in a hang are allowed; its result is kept, and a DataLoader's worker is in no one's way."""

    def train() -> int:
        import os
        import time

        import torch
        import torch.distributed as dist

        import distmagic

        dist.init_process_group("gloo")
        if os.environ["RANK"] == "1":
            distmagic.report(step=1)
            dist.recv(torch.zeros(1), 0)
            return -1
        step = 0
        try:
            while True:
                for _ in torch.utils.data.DataLoader(range(1000), num_workers=1):
                    time.sleep(0.01)
                    step += 1
                    distmagic.report(step=step)  # the worker has begun
        except KeyboardInterrupt:
            time.sleep(5)
            print("kept", step, flush=True)
        return step

    screen = runner.Watch(at_work(2), lambda: signal.raise_signal(signal.SIGINT))
    error = runner.failure_warm(warm_lab, "dm1:1,dm2:1", train, screen=screen)
    assert isinstance(error, Cancelled)
    assert "Traceback" not in error.run.logs(0)
    assert f"kept {error.run.results[0]}\n" in error.run.logs(0)
    assert error.run.state.workers[1].phase == "stopped"


@pytest.mark.quick
def test_a_timeout_ends_everything(warm_lab):
    error = runner.failure_warm(warm_lab, "dm1:1", stubborn, timeout_s=4.0)
    assert isinstance(error, TimedOut)


def test_a_host_that_can_t_start_takes_the_others_back(warm_lab, golden):
    warm_lab.hosts[0].exec(["mkdir", "-p", "/home/node/only-here"])
    error = runner.failure_warm(
        warm_lab, "dm1:1,dm2:1", stubborn, cwd="/home/node/only-here"
    )
    assert isinstance(error, PreflightError)
    assert error.host == "dm2"
    golden(error.message)
