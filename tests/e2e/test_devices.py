"""`--devices` on shared hosts: who has them, who waits, and what is left of those that are gone."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

import distmagic
from distmagic.api import session
from distmagic.errors import Cancelled, PreflightError, RunError
from distmagic.names import owner
from distmagic.remote.system import processes
from distmagic.session.background import BackgroundRun
from tests.e2e import faults, runner
from tests.e2e.gpus import claims, give_gpus, take_gpus
from tests.e2e.runner import as_value
from tests.lab import Lab, LabHost
from tests.lab.nvml import give_nvidia_gpus
from tests.lab.waiting import HANG_S, wait_until

pytestmark = pytest.mark.needs("lab")


@pytest.fixture
def gpus(lab: Lab) -> Iterator[Lab]:
    """The lab, whose first two hosts have two GPUs each. Nothing is kept loaded after the test."""
    hosts = lab.hosts[:2]
    for host in hosts:
        give_gpus(host)
    yield lab
    session().close()
    for host in hosts:
        take_gpus(host)
    lab.assert_clean()


def begin(lab: Lab, hosts: str, fn: Any, *devices: int, **more: Any) -> BackgroundRun:
    way = runner.access(lab, warm_idle_s=more.pop("warm_idle_s", 0.0))
    found = distmagic.run(
        as_value(fn),
        hosts=hosts,
        devices=devices,
        access=way,
        screen=runner.Watch(),
        background=True,
        **more,
    )
    assert isinstance(found, BackgroundRun)
    return found


def until_go() -> str:
    """Work until the file `go` is there."""
    import os
    import time
    from pathlib import Path

    import distmagic

    distmagic.report(step=0)
    while not Path("~/go").expanduser().exists():
        time.sleep(0.02)
    return os.environ["CUDA_VISIBLE_DEVICES"]


def alone() -> str:
    """Use the devices for a moment; fail if another rank does at that time."""
    import os
    import time
    from pathlib import Path

    devices = os.environ["CUDA_VISIBLE_DEVICES"]
    mark = Path(f"~/used-{devices}").expanduser()
    mark.touch(exist_ok=False)
    time.sleep(0.3)
    mark.unlink()
    return devices


def waits_for(run: BackgroundRun) -> list[str]:
    return [node.waits_for for node in run.state.nodes]


def until_it_waits(run: BackgroundRun) -> list[str]:
    wait_until(lambda: run.done or any(waits_for(run)), "the run to wait")
    assert run.state.phase == "waiting", run
    return waits_for(run)


def at_work(run: BackgroundRun) -> None:
    def ranks_work() -> bool:
        return runner.at_work(len(run.state.nodes))(run.state)

    wait_until(lambda: run.done or ranks_work(), "ranks that work")
    assert not run.done, run


def held_by(host: LabHost, job: str) -> str:
    """Return what is told of device 0 of a host, which a job has: each host counts from when it was asked."""
    (since_ns,) = re.findall(rf"@distmagic-claim-0-(\d+)-\d+-{job}", claims(host))
    began_s = time.time() - processes.up_s() + int(since_ns) / 1e9
    since = time.strftime("%H:%M", time.localtime(began_s))
    return f"device 0, held by job {job} of {owner()} since {since}"


def contacts(host: LabHost) -> list[int]:
    return faults.pids(host, "contact", "")


def sessions(host: LabHost) -> list[int]:
    """Return the processes of sshd that have a connection with a contact."""
    return faults.pids(host, "session", "")


def test_runs_wait_for_devices_and_a_job_that_is_killed_frees_them(gpus):
    first = begin(gpus, "dm1,dm2", until_go, 0)
    at_work(first)
    held = [held_by(host, first.job) for host in gpus.hosts[:2]]

    # Whoever does not wait is told who has the device.
    with pytest.raises(PreflightError) as refused:
        begin(gpus, "dm1,dm2", alone, 0, no_wait=True).wait(HANG_S)
    assert refused.value.host == "dm1"
    assert held[0] in refused.value.message

    # Two runs that list the hosts in different orders wait, and the view says for what.
    wait_until(lambda: len(contacts(gpus.hosts[0])) == 1, "others to have ended")
    of_first = contacts(gpus.hosts[0])
    second = begin(gpus, "dm1,dm2", alone, 0)
    assert until_it_waits(second) == held

    # Our process on a host is killed for one run. It gets another one over the connection of both, and the other waits on.
    of_both, connection = contacts(gpus.hosts[0]), sessions(gpus.hosts[0])
    faults.send(gpus.hosts[0], of_first, signal.SIGKILL)
    wait_until(lambda: set(contacts(gpus.hosts[0])) - set(of_both), "another process")
    wait_until(lambda: not any(node.broken for node in first.state.nodes), "its run")
    assert set(of_both) - set(of_first) <= set(contacts(gpus.hosts[0]))
    assert set(sessions(gpus.hosts[0])) == set(connection)
    assert waits_for(second) == held
    third = begin(gpus, "dm2,dm1", alone, 0, warm_idle_s=900.0)
    assert until_it_waits(third) == held[::-1]

    # Neither is in the way of a run that needs the other device.
    other = begin(gpus, "dm1", alone, 1)
    assert dict(other.wait(HANG_S).results) == {0: "1"}

    # One that is stopped started nothing.
    stopped = begin(gpus, "dm1,dm2", alone, 0)
    until_it_waits(stopped)
    stopped.stop()
    with pytest.raises(Cancelled, match="nothing was started"):
        stopped.wait()

    # A job whose agents are killed has no devices any more; those that waited get them, one after the other.
    for host in gpus.hosts[:2]:
        (agent,) = [one for one in host.processes() if "agent" in one.cmdline]
        os.kill(agent.outer_pid, signal.SIGKILL)
    assert dict(second.wait(HANG_S).results) == {0: "0", 1: "0"}
    assert dict(third.wait(HANG_S).results) == {0: "0", 1: "0"}
    with pytest.raises(RunError):
        first.wait(HANG_S)

    # An agent that was forked from what is kept loaded keeps its devices as well.
    warm = begin(gpus, "dm1,dm2", until_go, 0, 1, warm_idle_s=900.0)
    at_work(warm)
    assert claims(gpus.hosts[0]).count(warm.job) == 2
    assert f"held by job {warm.job}" in "".join(
        until_it_waits(last := begin(gpus, "dm2", alone, 1))
    )
    for host in gpus.hosts[:2]:
        (host.home / "go").touch()
    assert dict(warm.wait(HANG_S).results) == dict.fromkeys(range(4), "0,1")
    assert dict(last.wait(HANG_S).results) == {0: "1"}
    for host in gpus.hosts[:2]:
        wait_until(lambda h=host: not claims(h), "no claim to be left")


def test_a_run_shows_how_busy_the_gpus_of_its_hosts_are(ended):
    """Played by a library that answers as NVIDIA's does."""
    (host, *_) = ended.hosts
    give_nvidia_gpus(host, 2)
    run = begin(ended, "dm1:1", until_go, env={"CUDA_VISIBLE_DEVICES": "0,1"})
    wait_until(lambda: run.done or has_gpus(run), "the load of the GPUs")
    found = run.state.nodes[0].hardware
    (host.home / "go").touch()
    run.wait(HANG_S)
    (host.home / "go").unlink()
    assert found is not None
    assert [(gpu.utilization, gpu.celsius) for gpu in found.gpus] == [(0.5, 40.0)] * 2
    assert {gpu.total_bytes for gpu in found.gpus} == {80 << 30}


def has_gpus(run: BackgroundRun) -> bool:
    found = run.state.nodes[0].hardware
    return found is not None and bool(found.gpus)
