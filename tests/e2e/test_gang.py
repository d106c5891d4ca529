"""Jobs that nobody watches: hosts notice each other's failure and end among themselves; the notebook comes and goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import distmagic
from distmagic.api import session
from distmagic.errors import RendezvousFailed, WorkerFailed
from distmagic.outcome.detached import Detached
from distmagic.outcome.run import Run
from distmagic.planning.jobs import Job, choose
from distmagic.request.hosts import parse_hosts
from tests.e2e import faults, runner
from tests.e2e.runner import as_value, detach, reach
from tests.lab import Lab
from tests.lab.files import HOME
from tests.lab.waiting import wait_until

pytestmark = pytest.mark.needs("lab")

LOST_S = 3.0


def until_told(what: str) -> str:
    """Wait for a file `go` in this rank's home; then rank 1 does `what`, and the others go on waiting."""
    import os
    import time
    from pathlib import Path

    here = Path("~/go").expanduser()
    while not here.exists():
        time.sleep(0.02)
    if what == "return":
        return "well"
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 can't")
    while True:
        time.sleep(0.1)


def tell(lab: Lab, *names: str) -> None:
    for host in lab.hosts:
        if host.name in names:
            host.exec(["touch", f"{HOME}/go"]).check_returncode()


def job_of(lab: Lab, left: Detached, hosts: str) -> Job:
    return choose(session().housekeeping.jobs(reach(lab, parse_hosts(hosts))), left.job)


def ended(lab: Lab, left: Detached, hosts: str) -> Job:
    """Wait until a job has ended on all of these hosts, and return what they know of it."""
    wait_until(lambda: not job_of(lab, left, hosts).is_running, "the job's end")
    return job_of(lab, left, hosts)


def follow(lab: Lab, job: Job, screen: runner.Watch | None = None) -> Run:
    run = session().attach(
        reach(lab, parse_hosts(",".join(job.hosts))), job, screen or runner.Watch()
    )
    assert isinstance(run, Run)
    return run


@pytest.mark.promise(
    "a detached job outlives its kernel, and another kernel can follow it"
)
def test_detached_job_outlives_its_kernel(lab):
    script = (
        "from tests.e2e.test_gang import detach, until_told\nfrom tests.e2e.runner import as_value\n"
        "from types import SimpleNamespace\n"
        f"lab = SimpleNamespace(ssh_config={str(lab.ssh_config)!r})\n"
        "left = detach(lab, 'dm1:1,dm2:1', as_value(until_told), 'return', lease_s=1.0)\nprint(left.job, flush=True)\n"
    )
    kernel = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        timeout=150,
        check=True,
    )
    jobs = session().housekeeping.jobs(reach(lab, parse_hosts("dm1,dm2")))
    assert [(job.name, job.phase) for job in jobs] == [
        (kernel.stdout.decode().split()[-1], "detached")
    ]
    run = follow(
        lab,
        jobs[0],
        runner.Watch(
            lambda state: len(state.workers) == 2, lambda: tell(lab, "dm1", "dm2")
        ),
    )
    assert dict(run.results) == {0: "well", 1: "well"}
    lab.assert_clean()


def test_a_job_that_is_to_keep_going_is_left_when_its_notebook_is_cut_off_for_long(
    lab, golden
):
    def cut() -> None:
        for host in lab.hosts[:2]:
            host.drop(port=22)

    screen = runner.Watch(lambda state: len(state.workers) == 2, cut)
    left = distmagic.run(
        as_value(until_told),
        "return",
        hosts="dm1:1,dm2:1",
        access=runner.access(lab, lease_s=5.0),
        screen=screen,
        on_disconnect="keep",
    )
    assert isinstance(left, Detached)
    assert screen.last is not None
    assert screen.last.notices[1:] == (repr(left),)
    golden(screen.last.notices[0])
    session().close()
    for host in lab.hosts[:2]:
        host.undrop()
    tell(lab, "dm1", "dm2")
    run = follow(lab, job_of(lab, left, "dm1,dm2"))
    assert dict(run.results) == {0: "well", 1: "well"}
    lab.assert_clean()


def test_a_failure_ends_the_job_on_all_hosts_though_nobody_watches(lab):
    left = detach(lab, "dm1:1,dm2:1,dm3:1", until_told, "raise")
    # A rank that fails before the others have begun is the only one that there ever was.
    for host in lab.hosts:
        wait_until(
            lambda host=host: faults.pids(host, "rank", left.job),
            f"the rank on {host.name}",
        )
    tell(lab, "dm2")
    job = ended(lab, left, "dm1,dm2,dm3")
    assert job.phase == "failed"
    lab.assert_clean()
    with pytest.raises(WorkerFailed, match="ValueError: rank 1 can't") as caught:
        follow(lab, job)
    assert caught.value.message.startswith("rank 1 (dm2, local_rank 0)")
    assert isinstance(caught.value.run, Run)
    assert {rank: worker.phase for rank, worker in caught.value.run.state.workers.items()} == {
        0: "stopped", 1: "failed", 2: "stopped",
    }  # fmt: skip


def test_a_host_that_falls_silent_ends_the_job_though_nobody_watches(lab):
    left = detach(
        lab, "dm1:1,dm2:1,dm3:1", until_told, "return", node_lost_after_s=LOST_S
    )
    lab.hosts[1].freeze()
    assert ended(lab, left, "dm1,dm3").phase == "lost"
    assert [host.leftovers() for host in (lab.hosts[0], lab.hosts[2])] == [(), ()]
    lab.hosts[1].thaw()  # when it goes on, it finds that it is alone
    ended(lab, left, "dm2")
    lab.assert_clean()  # it has to miss the others first


def test_a_kept_job_goes_on_when_its_kernel_dies(lab):
    script = (
        "import distmagic\nfrom tests.e2e import runner\nfrom tests.e2e.test_gang import until_told\n"
        "from tests.e2e.runner import as_value\nfrom distmagic.request.access import Access\n"
        f"way = Access(ssh_config={str(lab.ssh_config)!r}, lease_s=2.0, warm_idle_s=0.0)\n"
        "distmagic.run(as_value(until_told), 'return', hosts='dm1:1,dm2:1', access=way, on_disconnect='keep',\n"
        "    screen=runner.Watch(lambda state: len(state.workers) == 2, lambda: print('up', flush=True)))\n"
    )
    kernel = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
    )
    try:
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == b"up\n"
    finally:
        kernel.kill()
        kernel.communicate()

    def only_job() -> Job:
        (job,) = session().housekeeping.jobs(reach(lab, parse_hosts("dm1,dm2")))
        return job

    wait_until(lambda: only_job().phase == "detached", "the end of the lease")
    tell(lab, "dm1", "dm2")
    run = follow(lab, only_job())
    assert dict(run.results) == {0: "well", 1: "well"}
    assert run.state.detached_by == "disconnected"
    lab.assert_clean()


def test_without_udp_no_job_is_detached(lab, golden):
    lab.hosts[1].drop_udp()
    with pytest.raises(RendezvousFailed) as caught:
        detach(lab, "dm1:1,dm2:1", until_told, "return")
    golden(caught.value.message)
    lab.assert_clean()
