"""Jobs seen from a second kernel: listed, followed to their end, read, stopped, removed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distmagic.api import session
from distmagic.errors import Cancelled, HostError
from tests.e2e import runner
from tests.e2e.programs import COUNTING_KERNEL
from tests.e2e.runner import reach, the_job
from tests.lab import Lab
from tests.lab.waiting import HANG_S, wait_until

pytestmark = pytest.mark.needs("lab")


@contextmanager
def another_kernel(lab: Lab, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Start a job of two hosts in another process, and wait until both ranks have printed. See `let_end`."""
    script = COUNTING_KERNEL.format(config=str(lab.ssh_config), seconds=seconds)
    kernel = subprocess.Popen(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2]
    )
    try:
        for host in lab.hosts[:2]:
            wait_until(
                lambda host=host: host.ranks_that_printed(), "the first words of a rank"
            )
        yield kernel
    finally:
        kernel.kill()
        kernel.wait()


def let_end(lab: Lab) -> None:
    """Let the job end when it has counted for as long as it shall: no sooner, however slow this kernel is."""
    for host in lab.hosts[:2]:
        (host.home / "go").touch()


def test_a_second_kernel_follows_a_job_whose_first_kernel_dies(lab):
    with another_kernel(lab, 12.0) as kernel:
        job, hosts = the_job(lab, "dm3,dm2,dm1")
        assert (job.phase, job.hosts, [host.name for host in hosts]) == (
            "running",
            ("dm1", "dm2"),
            ["dm1", "dm2"],
        )
        screen = runner.Watch(
            lambda state: any(worker.step for worker in state.workers.values()),
            lambda: (kernel.kill(), let_end(lab)),
        )
        run = session().attach(reach(lab, hosts), job, screen)
    assert run.state.phase == "done"
    assert dict(run.results) == {0: 120, 1: 120}
    for rank in (0, 1):  # from the first line on, though this kernel came later
        assert [line.text for line in run.state.lines if line.rank == rank] == [
            str(i) for i in range(120)
        ]
    lab.assert_clean()
    # It has ended; its journal tells all once more.
    again = session().attach(reach(lab, hosts), job, runner.Watch())
    assert dict(again.results) == {0: 120, 1: 120}
    over, hosts = the_job(lab, "dm1,dm2")
    assert (over.phase, over.age_s > 12.0) == ("done", True)
    session().housekeeping.remove(reach(lab, hosts), [job])
    with pytest.raises(HostError, match=f"job {job.name} "):
        again.logs(0)
    assert not any(
        one.name == job.name for one in session().housekeeping.jobs(reach(lab, hosts))
    )


@pytest.mark.quick
def test_a_job_is_read_and_stopped_from_another_kernel(lab):
    with another_kernel(lab, 600.0) as kernel:
        job, hosts = the_job(lab, "dm1,dm2")
        assert (
            session().housekeeping.logs(reach(lab, hosts), job, 1).startswith("0\n1\n")
        )
        with pytest.raises(HostError, match=f"job {job.name} "):
            session().housekeeping.remove(reach(lab, hosts), [job])
        session().housekeeping.stop(reach(lab, hosts), job)
        assert kernel.wait(HANG_S) == 1  # its run ended, and not as it wished
        lab.assert_clean()
    assert the_job(lab, "dm1,dm2")[0].phase == "stopped"


def test_an_interrupt_of_the_second_kernel_ends_the_job(lab):
    with another_kernel(lab, 600.0) as kernel:
        job, hosts = the_job(lab, "dm1,dm2")
        screen = runner.Watch(
            lambda state: bool(state.workers),
            lambda: signal.raise_signal(signal.SIGINT),
        )
        with pytest.raises(Cancelled):
            session().attach(reach(lab, hosts), job, screen)
        assert kernel.wait(HANG_S) == 1
        lab.assert_clean()
