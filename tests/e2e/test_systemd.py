"""Hosts on which a real systemd, log-ins and all, ends what a user leaves running, or doesn't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import distmagic
from distmagic.api import session
from distmagic.errors import PreflightError
from distmagic.outcome.detached import Detached
from tests.e2e import faults, runner
from tests.e2e.runner import as_value, at_work
from tests.lab import HostSetup, Lab, LabHost
from tests.lab.cgroups import reason_without
from tests.lab.waiting import wait_until

pytestmark = pytest.mark.needs("lab", "systemd")

KILLS = "KillUserProcesses=yes\nKillExcludeUsers=nobody"  # root, who logs in here, is excluded where nobody else is
WHERE = "KillUserProcesses and KillOnlyUsers in logind.conf"
_STATES = """
set -e
for session in $(loginctl list-sessions --no-legend | awk '{print $1}'); do
    loginctl show-session --property=State --value "$session" || true
done
"""
CURE = "loginctl enable-linger root (as root, where that is refused)"


@pytest.fixture
def make_host(make_lab: Callable[..., Lab]) -> Callable[[str], Lab]:
    """Return a function that starts a host with these lines of logind.conf."""
    if reason := reason_without():
        pytest.skip(reason)
    return lambda logind: make_lab(1, setups=(HostSetup(logind=logind),))


def until_told() -> int:
    """Report a step, and wait for a file `go`."""
    import time
    from pathlib import Path

    import distmagic

    distmagic.report(step=1)
    while not Path("~/go").expanduser().exists():
        time.sleep(0.01)
    return 7


def detach(lab: Lab, **way: Any) -> Detached:
    left = distmagic.run(
        as_value(until_told),
        hosts="dm1:1",
        detach=True,
        access=runner.access(lab, **way),
        screen=runner.Watch(),
    )
    assert isinstance(left, Detached)
    return left


def linger(host: LabHost) -> None:
    host.exec(["loginctl", "enable-linger", "root"]).check_returncode()


def log_out(host: LabHost) -> None:
    """End this kernel's connections, and wait until systemd counts no session that isn't over or about to be."""
    session().close()

    def is_alone() -> bool:
        said = host.exec(["sh", "-c", _STATES])
        return said.returncode == 0 and set(said.stdout.split()) <= {"closing"}

    wait_until(is_alone, "the end of all sessions")


def test_a_job_can_not_be_left_alone_where_it_would_be_killed(make_host):
    lab = make_host(KILLS)
    with pytest.raises(PreflightError) as caught:
        detach(lab)
    assert caught.value.host == "dm1"
    assert WHERE in caught.value.message
    assert CURE in caught.value.message
    (lab.hosts[0].home / "go").touch()
    run = runner.run(lab, "dm1:1", until_told)
    assert dict(run.results) == {0: 7}
    (notice,) = run.state.notices
    assert notice.startswith("dm1: systemd ")
    assert WHERE in notice
    assert CURE in notice


@pytest.mark.parametrize(
    ("logind", "warm_idle_s"),
    [("KillUserProcesses=yes", 600.0), (KILLS, 0.0), (KILLS, 600.0)],
)
def test_a_job_that_is_left_alone_outlives_the_session(make_host, logind, warm_idle_s):
    lab = make_host(logind)
    host = lab.hosts[0]
    if logind == KILLS:
        linger(host)
    left = detach(lab, warm_idle_s=warm_idle_s)
    wait_until(lambda: bool(faults.pids(host, "rank", "*")), "a rank")
    log_out(host)
    (host.home / "go").touch()
    run: Any = left.attach()
    assert dict(run.results) == {0: 7}
    assert run.state.notices == ()
    session().down()
    lab.assert_clean()


def test_a_run_outlives_its_connection_where_its_user_lingers(make_host):
    lab = make_host(KILLS)
    host = lab.hosts[0]
    linger(host)

    def break_connection() -> None:
        for pid in faults.pids(host, "session", "*"):
            host.exec(["kill", "-KILL", str(pid)])
        (host.home / "go").touch()

    run: Any = distmagic.run(
        as_value(until_told), hosts="dm1:1", access=runner.access(lab, warm_idle_s=600.0),
        screen=runner.Watch(at_work(1), break_connection),
    )  # fmt: skip
    assert dict(run.results) == {0: 7}
    session().down()
    lab.assert_clean()
