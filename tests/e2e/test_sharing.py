"""What is used by several at once: a host by two kernels, or under two names; a /tmp or a home by two hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import distmagic
from distmagic.api import session
from distmagic.outcome.detached import Detached
from distmagic.outcome.run import Run
from distmagic.request.hosts import parse_hosts
from tests import REPOSITORY
from tests.e2e import runner
from tests.e2e.programs import stubborn
from tests.e2e.runner import as_value, reach
from tests.lab import HostSetup, Lab, LabHost
from tests.lab.processes import HostProcess
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]

HOSTS = "dm1:1,dm2:1"
ANOTHER_KERNEL = """
import json, sys
import distmagic
from distmagic.api import session
from distmagic.request.hosts import parse_hosts
from distmagic.request.access import Access
from tests.e2e import runner
from tests.e2e.runner import as_value

WAY = Access(ssh_config=sys.argv[1])

def run(fn, *args, **more):
    return distmagic.run(as_value(fn), *args, hosts="dm1:1,dm2:1", access=WAY, screen=runner.Watch(), **more)

for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""


class AnotherKernel:
    """Another process that reaches the same hosts, with a session of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def begin(self, expression: str) -> None:
        """Have it compute an expression."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{expression}\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the value of the last expression."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def value(self, expression: str) -> Any:
        self.begin(expression)
        return self.answer()


@contextmanager
def another_kernel(lab: Lab) -> Iterator[AnotherKernel]:
    process = subprocess.Popen(
        [sys.executable, "-c", ANOTHER_KERNEL, str(lab.ssh_config)], cwd=REPOSITORY, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield AnotherKernel(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def warm() -> Iterator[None]:
    """Nothing of this kernel is kept loaded before the test, nor on hosts of labs that are gone, and nothing after it."""
    session().down()
    yield
    session().close()


def run(lab: Lab, hosts: str, fn: Callable[..., Any], *args: Any, **more: Any) -> Any:
    screen = more.pop("screen", None) or runner.Watch()
    way = runner.access(lab, warm_idle_s=900.0)
    return distmagic.run(
        as_value(fn), *args, hosts=hosts, access=way, screen=screen, **more
    )


def templates(host: LabHost) -> list[HostProcess]:
    return [one for one in host.processes() if one.cmdline[-1:] == ("template",)]


def who() -> tuple[int, list[int]]:
    """Return on which network this rank is, and the pids of this rank, its parent, and so on."""
    import os
    from pathlib import Path

    pids = [os.getpid()]
    while pids[-1] > 1:
        with open(f"/proc/{pids[-1]}/stat") as file:
            pids.append(int(file.read().rpartition(")")[2].split()[1]))
    return Path("/proc/self/ns/net").stat().st_ino, pids


def totals(run: Run) -> list[float]:
    return [float(run.results[rank]["total"]) for rank in run.results]


# ---- two kernels, one host


@pytest.mark.usefixtures("warm")
def test_two_kernels_run_on_the_same_hosts_at_once_and_neither_ends_what_is_the_other_s(
    lab,
):
    assert totals(run(lab, HOSTS, runner.all_reduce)) == [1.0, 1.0]
    own = {template.pid for template in templates(lab.hosts[0])}
    with another_kernel(lab) as other:
        total = (
            "[float(one['total']) for one in run(runner.all_reduce).results.values()]"
        )
        assert other.value(total) == [1.0, 1.0]
        both = {template.pid for template in templates(lab.hosts[0])}
        assert (len(own), len(both), own < both) == (1, 2, True)
        other.begin(f"[{total} for _ in range(3)]")
        assert [totals(run(lab, HOSTS, runner.all_reduce)) for _ in range(3)] == [
            [1.0, 1.0]
        ] * 3
        assert other.answer() == [[1.0, 1.0]] * 3
        assert {template.pid for template in templates(lab.hosts[0])} == both

        assert other.value("session().down()") == []
        assert {template.pid for template in templates(lab.hosts[0])} == own
        _, pids = run(lab, HOSTS, who).results[0]
        assert own <= set(pids), "still warm"


def _jobs(lab: Lab, hosts: str = HOSTS) -> tuple[Any, ...]:
    return session().housekeeping.jobs(reach(lab, parse_hosts(hosts)))


# ---- one host, two names


@pytest.fixture
def twin(lab: Lab) -> Lab:
    """The lab, in which dm1 is dm1b as well."""
    alias = f"Host dm1b\n  HostName {lab.hosts[0].address}\n"
    lab.ssh_config.write_text(alias + lab.ssh_config.read_text())
    return lab


ONE_MACHINE = "dm1 and dm1b are one machine: the ranks of all of them share its devices and memory."


def test_one_host_under_two_names_in_a_list_is_two_nodes_and_told_of(twin):
    found = runner.run(twin, "dm1:1,dm1b:1", runner.all_reduce)
    assert [
        (found.results[rank]["host"], float(found.results[rank]["total"]))
        for rank in (0, 1)
    ] == [("dm1", 1.0)] * 2
    assert found.state.notices == (ONE_MACHINE,)
    (job,) = _jobs(twin, "dm1,dm1b")
    assert (job.hosts, job.phase, len(job.known)) == (("dm1", "dm1b"), "done", 2)


# ---- two hosts, one /tmp or one home


@pytest.fixture(
    scope="module", params=[True, False], ids=["home, tmp and name", "home and name"]
)
def kept_shared(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Two hosts that share their home and their name, and their /tmp as containers on one machine may."""
    setups = (HostSetup(hostname="node"),) * 2
    with Lab(2, shared_home=True, shared_tmp=request.param, setups=setups) as lab:
        yield lab


@pytest.fixture
def shared(kept_shared: Lab) -> Iterator[Lab]:
    """The same, whole and with an empty home."""
    yield kept_shared
    session().close()
    kept_shared.assert_clean()
    kept_shared.mend()


def test_hosts_that_share_a_home_or_tmp_are_both_warm(shared):
    for _ in range(2):
        found = run(shared, "dm1:2,dm2:2", who).results
        own = [templates(host) for host in shared.hosts]
        assert [len(one) for one in own] == [1, 1]
        networks = [network for network, _ in found.values()]
        assert networks[0] == networks[1] != networks[2] == networks[3], (
            "each rank is on its own host"
        )
        for rank, (_, pids) in found.items():
            assert own[rank // 2][0].pid in pids, "and comes from that host's template"
    kept = session().housekeeping.templates(reach(shared, parse_hosts("dm1,dm2")))
    assert [[one.pid for one in of_host or ()] for of_host in kept] == [
        [one[0].pid] for one in own
    ]


def test_jobs_of_hosts_that_share_a_home_or_tmp_are_followed_read_and_ended_where_they_run(
    shared,
):
    left = run(shared, HOSTS, stubborn, detach=True)
    assert isinstance(left, Detached)
    job = next(one for one in _jobs(shared) if one.name == left.job)
    assert (job.phase, job.running, job.host_indices) == ("detached", (0, 1), (0, 1))
    left.stop()
    assert [one.phase for one in _jobs(shared)] == ["stopped"]
    again = run(shared, HOSTS, runner.all_reduce)
    assert totals(again) == [1.0, 1.0]
    assert (
        session().housekeeping.remove(reach(shared, parse_hosts("dm1,dm2")), [job]) > 0
    )
    assert [one.phase for one in _jobs(shared)] == ["done"]


def test_what_a_killed_agent_left_is_ended_by_its_own_host_alone(shared):
    """A detached job whose agent on dm2 is killed: no other host may take away by what dm2 finds the orphans."""
    left = run(shared, HOSTS, stubborn, detach=True, cold=True)
    assert isinstance(left, Detached)
    second = shared.hosts[1]

    def sleepers() -> list[HostProcess]:
        return [one for one in second.processes() if one.name == "sleep"]

    wait_until(lambda: len(sleepers()) == 2, "the children of the rank")
    (agent,) = [one for one in second.processes() if "agent" in one.cmdline]
    os.kill(agent.outer_pid, signal.SIGKILL)
    (folder,) = [name for name in second.listdir("/tmp") if f"{left.job}-1" in name]
    # Nobody has used it for long.
    second.exec(["touch", "-d", "1 hour ago", f"/tmp/{folder}"]).check_returncode()
    _jobs(shared, "dm1")
    assert folder in second.listdir("/tmp")
    assert len(sleepers()) == 2
    _jobs(shared, "dm2")
    wait_until(lambda: not sleepers(), "the orphans to be ended")
    wait_until(
        lambda: not [one for one in _jobs(shared, "dm1") if one.is_running],
        "the end of the job",
    )
