"""Hosts that can't be used: each has its sentence, and nothing was started anywhere."""

from __future__ import annotations

import pytest

from distmagic.errors import HostErrors, PreflightError
from tests.e2e import runner
from tests.lab import HostSetup

pytestmark = pytest.mark.needs("lab")


def nothing() -> None:
    """Do nothing."""


@pytest.mark.quick
def test_hosts_without_python_are_all_named(make_lab):
    lab = make_lab(2, setups=(HostSetup(python="none"), HostSetup(python="none")))
    error = runner.failure(lab, "dm1,dm2", lambda: None)
    assert isinstance(error, HostErrors)
    for name, one in zip(("dm1", "dm2"), error.errors, strict=True):
        assert isinstance(one, PreflightError)
        assert one.host == name
        assert "no python3" in one.message
        assert f"--python {name}=" in one.hint


@pytest.mark.quick
def test_a_host_without_torch(make_lab):
    lab = make_lab(2, setups=(HostSetup(python="bare"),))
    error = runner.failure(lab, "dm1,dm2", lambda: None)
    assert isinstance(error, PreflightError)
    assert error.message.startswith("dm1: Python /")
    assert error.message.endswith(" has no torch.")
    assert "--python dm1=" in error.hint


def test_start_up_files_of_a_log_in_shell_that_are_in_the_way(lab):
    """Each host has others; none takes the time of a host that does not answer."""
    for host, lines in zip(
        lab.hosts,
        ("exec sh", "case $- in *i*) ;; *) exit ;; esac", "cat >/dev/null"),
        strict=True,
    ):
        (host.home / ".bashrc").write_text(f"{lines}\n")
    error = runner.failure(lab, "dm1,dm2,dm3", lambda: None)
    assert isinstance(error, HostErrors)
    whys = (
        "runs another shell",
        "ended (exit code 0)",
        "does not run the command, or reads",
    )
    for one, why in zip(error.errors, whys, strict=True):
        assert isinstance(one, PreflightError)
        assert f"{one.host}: its log-in shell {why}" in one.message
        assert one.hint.endswith(f"{one.host} echo ok")


def seven() -> int:
    return 7


def test_start_up_files_that_read_some_lines_are_no_obstacle(lab):
    (lab.hosts[0].home / ".bashrc").write_text("read -r PROJECT; read -r TEAM\n")
    run = runner.run(lab, "dm1:1,dm2:1", seven)
    assert run.results == {0: 7, 1: 7}
