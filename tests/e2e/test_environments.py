"""Environments of hosts: what `--setup` sets up, what `env sync` installs, and `--exec-prefix`, which starts all of a run."""

from __future__ import annotations

from contextlib import closing

import pytest

from distmagic.api import session
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import PreflightError
from distmagic.request.access import Access
from distmagic.request.hosts import parse_hosts
from distmagic.session.housekeeping import Synced
from distmagic.session.packages import Packages
from tests.builders.wheels import played_uv, wheel
from tests.e2e import runner
from tests.e2e.runner import as_value
from tests.lab import Lab

pytestmark = pytest.mark.needs("lab")


def seen() -> tuple[str | None, str | None, str | None]:
    """Return what the environment of this rank has of these tests, and whose network it is in."""
    import os
    import subprocess

    child = subprocess.run(
        ["sh", "-c", "echo $MODEL"], capture_output=True, text=True, check=False
    )
    return os.environ.get("MODEL"), child.stdout.strip(), os.environ.get("INSIDE")


def test_what_a_setup_exports_is_in_every_rank_and_its_child(ended):
    """The first run of each set-up starts its template, and the second one is forked from that."""
    for host in ended.hosts[:2]:
        activate = host.home / "activate"
        activate.write_text("echo >> ~/loaded; export MODEL=small\n")
    for value in ("small", "large"):  # another setup is another environment
        setup = "source ~/activate" + ("" if value == "small" else "; MODEL=large")
        way = runner.access(ended, setup=setup, warm_idle_s=900.0)
        for _ in range(2):
            run = session_run(ended, way)
            assert dict(run.results) == {
                0: (value, value, None),
                1: (value, value, None),
            }
    for host in ended.hosts[:2]:  # once for each text
        assert (host.home / "loaded").read_text() == "\n\n"


def session_run(lab: Lab, way):
    """Run `seen` on two hosts, and leave what they keep loaded."""
    import distmagic

    return distmagic.run(
        as_value(seen), hosts="dm1:1,dm2:1", access=way, screen=runner.Watch()
    )


@pytest.mark.quick
def test_a_setup_that_fails_names_its_host(ended):
    way = runner.access(ended, setup="source ~/there-is-none")
    error = runner.failure(ended, "dm1:1", seen, access=way)
    assert isinstance(error, PreflightError)
    assert error.message.startswith("dm1: its --setup failed: ")
    assert "there-is-none" in error.message


@pytest.mark.quick
def test_an_environment_is_named_and_has_its_own_python(ended):
    found = ended.hosts[0].exec(["sh", "-c", "command -v python3"])
    python = found.stdout.strip()
    there = ended.hosts[0].home / "venvs" / "train" / "bin"
    there.mkdir(parents=True)
    (there / "python").write_text(f'#!/bin/sh\nINSIDE=venv exec {python} "$@"\n')
    (there / "python").chmod(0o755)
    way = runner.access(ended, pythons=(("", "env:venvs/train"),))
    run = runner.run(ended, "dm1:1", seen, access=way)
    assert run.results[0][2] == "venv"
    way = runner.access(ended, pythons=(("", "env:nothing"),))
    error = runner.failure(ended, "dm1:1", seen, access=way)
    assert error.host == "dm1"
    assert " nothing /home/node/nothing " in error.message
    assert " /home/node/miniconda3/envs/nothing " in error.message


def installed() -> tuple[str, str, object]:
    """Return in which environment this rank is, the version of a package that nothing else has, and a list of torch.

    Without an assertion: pytest's own module would be needed there for one.
    """
    import sys

    import alpha  # type: ignore[import-not-found]
    import torch

    return sys.prefix, str(alpha.VERSION), torch.zeros(1).tolist()


def test_an_environment_is_synced_to_both_hosts_and_runs_are_in_it(ended):
    hosts = ended.hosts[:2]
    for host in hosts:
        wheel(host.home / "wheels", "alpha", "3.0")
        ask = "import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])"
        there = host.exec(["python3", "-c", ask]).stdout
        wheel(host.home / "wheels", "torch", "2.0", files={"torch_is_there.pth": there})
        played_uv(host.home / "wheels")
        settings = host.home / ".config" / "pip"
        settings.mkdir(parents=True)
        (settings / "pip.conf").write_text(
            "[global]\nno-index = true\nfind-links = /home/node/wheels\n"
        )
    way = runner.access(ended)
    wanted = Packages(name="train", requirements=("alpha>2", "torch==2.0"))
    shown: list[dict] = []
    synced = sync(way, wanted, shown)
    assert synced.error is None
    assert [ready.was_there for ready in synced.ready.values()] == [False, False]
    assert {"dm1", "dm2"} == set(shown[-1])
    found = sync(way, wanted, shown)
    assert [ready.was_there for ready in found.ready.values()] == [True, True]
    run = runner.run(
        ended,
        "dm1:1,dm2:1",
        installed,
        access=runner.access(ended, pythons=(("", "env:train"),)),
    )
    for rank in (0, 1):
        prefix, version, zeros = run.results[rank]
        assert zeros == [0.0]
        assert prefix.startswith("/home/node/.distmagic/envs/")
        assert version == "3.0"
    # A host that can't have it is named, and the other one has it.
    (hosts[1].home / "wheels" / "alpha-3.0-py3-none-any.whl").unlink()
    half = sync(way, Packages(name="less", requirements=("alpha==3.0",)), shown)
    assert list(half.ready) == ["dm1"]
    assert half.error.host == "dm2"
    assert "alpha==3.0" in str(half.error)


def sync(way: Access, packages: Packages, shown: list[dict]) -> Synced:
    """Have an environment on two hosts, and put what was shown into `shown`."""
    with closing(NotebookAsker(can_ask=False)) as asker:
        reaching = session().reach(parse_hosts("dm1:1,dm2:1"), way, asker)
        return session().housekeeping.sync_environment(reaching, packages, shown.append)
