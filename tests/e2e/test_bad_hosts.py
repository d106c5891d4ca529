"""Hosts that can't be used: each has its sentence, and nothing was started anywhere."""

from __future__ import annotations

import importlib.metadata

import pytest

from distmagic.errors import HostErrors, PreflightError
from tests.e2e import runner
from tests.lab import HostSetup

pytestmark = pytest.mark.needs("lab")


def nothing() -> None:
    """Do nothing."""


@pytest.mark.quick
def test_a_host_without_python(make_lab):
    lab = make_lab(2, setups=(HostSetup(), HostSetup(python="none")))
    error = runner.failure(lab, "dm1,dm2", lambda: None)
    assert isinstance(error, PreflightError)
    assert error.host == "dm2"
    assert "no python3" in error.message
    assert "--python dm2=" in error.hint


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


def test_a_host_with_another_torch(lab):
    fake = lab.hosts[1].home / "other" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").touch()
    (fake / "version.py").write_text("__version__ = '2.4.1+cu124'\n")
    (lab.hosts[1].home / ".bashrc").write_text("export PYTHONPATH=$HOME/other\n")
    error = runner.failure(lab, "dm1,dm2", lambda: None)
    assert isinstance(error, PreflightError)
    ours = importlib.metadata.version("torch")
    assert error.host == "dm2"
    assert "torch 2.4.1+cu124" in error.message
    assert f" {ours.partition('+')[0]}" in error.message


def test_a_host_with_a_python_that_is_too_old(lab):
    fake = lab.hosts[1].home / "another-python"
    first = "import sys; sys.version_info=(3,9,7); "
    first += "exec(next(x for x in iter(sys.stdin.buffer.readline, b'') if x[:5] != b'echo '))"
    fake.write_text(f'#!/bin/sh\nexec python3 -u -c "{first}"\n')
    fake.chmod(0o755)
    way = runner.access(lab, pythons=(("dm2", "~/another-python"),))
    error = runner.failure(lab, "dm1,dm2", lambda: None, access=way)
    assert isinstance(error, PreflightError)
    assert error.message.startswith("dm2: Python 3.9.7 (")
    assert "3.10" in error.message


def test_a_full_disk(lab):
    lab.hosts[0].limit_home(64 << 10)
    error = runner.failure(lab, "dm1,dm2", lambda: None)
    assert isinstance(error, PreflightError)
    assert "No space left on device" in error.message or "is full" in error.message
    assert error.host == "dm1"
    assert "DISTMAGIC_HOME" in error.hint


def test_a_home_that_can_only_be_read(lab):
    lab.hosts[0].make_home_read_only()
    error = runner.failure(lab, "dm1,dm2", lambda: None)
    assert isinstance(error, PreflightError)
    assert error.host == "dm1"
    assert "[Errno 30]" in error.message


@pytest.mark.quick
def test_several_bad_hosts_are_all_named(make_lab):
    lab = make_lab(2, setups=(HostSetup(python="none"), HostSetup(python="none")))
    error = runner.failure(lab, "dm1,dm2", lambda: None)
    assert isinstance(error, HostErrors)
    assert [one.host for one in error.errors] == ["dm1", "dm2"]
    assert [type(one) for one in error.errors] == [PreflightError] * 2
