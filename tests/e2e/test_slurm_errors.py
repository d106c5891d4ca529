"""What is wrong with a request, with Slurm itself or with its answers: told in words, on real Slurm."""

from __future__ import annotations

import pytest

from distmagic.errors import AllocationEnded, PreflightError, UsageError
from distmagic.request.allocation import SlurmRequest
from distmagic.systems.slurm.allocation import ONE_CORE
from tests.e2e import runner
from tests.e2e.programs import count
from tests.e2e.runner import Watch, as_value
from tests.e2e.slurm_cells import (
    Noticing,
    failure,
    interrupt,
    run,
    submit,
    wait_until_it_runs,
)
from tests.lab import wait_until
from tests.lab.slurm import LOOK_S, SlurmLab

pytestmark = pytest.mark.needs("lab", "slurm")


HOSTILE = "a  'b' \"c\" $HOME `touch /run/mine` $(touch /run/mine) é \\ ! * ; | & # %j"


# ---- requests


@pytest.mark.parametrize(
    ("options", "nodes", "message"),
    [
        ((("partition", "nope"),), 1, "invalid partition specified: nope"),
        ((("frobnicate", "1"),), 1, "unrecognized option '--frobnicate=1'"),
    ],
)
def test_what_slurm_refuses_is_told_in_words(held, options, nodes, message):
    request = SlurmRequest(login="dm1", nodes=nodes, options=options)
    error = failure(held.slurm, as_value(count), 0.1, allocation=request)
    assert isinstance(error, UsageError)
    assert message in str(error)
    assert "sbatch" in str(error)


@pytest.mark.parametrize(
    ("options", "nodes", "reason"),
    [
        ({}, 99, "PartitionConfig"),
        ({"cpus-per-task": "99"}, 1, "PartitionConfig"),
        ({"partition": "short", "time": "60"}, 1, "Partition"),
        ({"partition": "closed", "account": "me"}, 1, "account"),
    ],
)
def test_a_job_that_slurm_takes_and_would_never_start_is_cancelled_and_told(
    held, options, nodes, reason
):
    request = SlurmRequest(login="dm1", nodes=nodes, options=tuple(options.items()))
    error = failure(held.slurm, as_value(count), 0.1, allocation=request)
    assert isinstance(error, UsageError)
    assert "is pending: it will never start (" in error.message
    assert reason in error.message
    assert error.message.endswith("It was cancelled.")
    assert "sinfo -o '%P %D" in error.hint
    wait_until(lambda: not held.slurm.jobs(), "the job to be gone", every_s=LOOK_S)


def test_hostile_values_that_slurm_refuses_are_refused_and_not_run(held):
    """All at once: no shell on the way may run any of them, and Slurm refuses the first that it reads."""
    names = ("partition", "constraint", "reservation", "mem", "time", "gpus-per-node", "nodelist", "licenses", "dependency")  # fmt: skip
    request = SlurmRequest(
        login="dm1", options=tuple((name, HOSTILE) for name in names)
    )
    error = failure(
        held.slurm,
        as_value(count),
        0.1,
        allocation=request,
        screen=Noticing("", interrupt),
    )
    assert isinstance(error, UsageError)
    assert "sbatch: " in error.message
    _assert_nothing_was_run(held.slurm)


def test_gpus_of_a_whole_job_are_told_also_of_a_job_that_is_there(slurm, kernel):
    with pytest.raises(UsageError, match="--gpus "):
        SlurmRequest(login="dm1", options=(("gpus", "4"),))
    job = submit(slurm, "--gpus=4", "-c4")
    wait_until_it_runs(slurm, job)
    request = SlurmRequest(login="dm1", job=job)
    error = failure(slurm, as_value(count), 0.1, allocation=request)
    slurm.command("scancel", job)
    assert "(--gpus)" in error.message
    assert "--gpus-per-node" in error.hint


# ---- scripts


def test_a_batch_script_that_fails_is_told(slurm, kernel):
    way = runner.access(slurm.lab, pythons=(("", "/nowhere/python3"),))
    error = failure(slurm, as_value(count), 0.1, access=way)
    assert isinstance(error, AllocationEnded | PreflightError)
    assert "--python" in error.hint
    _remove_logs(slurm)


def _remove_logs(slurm: SlurmLab) -> None:
    """Homes are not shared here, so nobody could read what a batch script printed."""
    for host in slurm.nodes:
        host.exec(["sh", "-c", "rm -f .distmagic-slurm-*"])


# ---- values


def test_hostile_values_arrive_as_they_are(slurm, kernel, tmp_path, monkeypatch):
    """In the account, the set-up, a variable, the interpreter, the notebook's directory, the names of a run."""
    folder = "/home/node/it's $HOME `id`"
    for host in slurm.nodes:
        script = f'#!/bin/sh\nexec {host.exec(["sh", "-c", "command -v python3"]).stdout.strip()} "$@"\n'
        place = 'mkdir -p "$1" && cat >"$1/python3" && chmod 755 "$1/python3"'
        host.exec(["sh", "-c", place, "sh", folder], stdin=script).check_returncode()
    here = tmp_path / HOSTILE.replace("/", "_")
    here.mkdir()
    monkeypatch.chdir(here)
    lines = HOSTILE + "\n$(touch /run/mine)\n"
    quoted = "'" + lines.replace("'", "'\\''") + "'"
    request = SlurmRequest(
        login="dm1",
        nodes=2,
        options=(("account", HOSTILE), ("mail-user", HOSTILE), ("qos", HOSTILE)),
        setup=f"export SAID={quoted}",
    )

    def said() -> tuple[str, str]:
        import os

        return os.environ["SAID"], os.environ["TOLD"]

    accounts: list[str] = []
    screen = Watch(
        lambda state: bool(state.workers),
        lambda: accounts.append(slurm.command("squeue", "-h", "-o", "%a").strip()),
    )
    found = run(
        slurm, as_value(said), allocation=request, screen=screen, env={"TOLD": lines},
        access=runner.access(slurm.lab, pythons=(("", f"{folder}/python3"),)),
    )  # fmt: skip
    assert dict(found.results) == {0: (lines, lines), 1: (lines, lines)}
    assert accounts == [HOSTILE.lower()]  # as Slurm keeps accounts
    assert screen.last is not None
    one_core = [one for one in screen.last.notices if ONE_CORE in one]
    assert one_core == [f"{slurm.names[0]}: {ONE_CORE}"], "nobody asked for cores"
    _assert_nothing_was_run(slurm)
    for host in slurm.nodes:
        host.exec(["rm", "-rf", folder])


def _assert_nothing_was_run(slurm: SlurmLab) -> None:
    for host in slurm.lab.hosts:
        assert "mine" not in host.listdir("/run"), f"a value was run on {host.name}"
