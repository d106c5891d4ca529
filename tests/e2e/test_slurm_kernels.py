"""Kernels and the allocations of real Slurm: what dies with a kernel, what another one finds, what several share."""

from __future__ import annotations

import dataclasses
import shlex
import signal
from pathlib import Path

import pytest

from distmagic.connection.prompts import NotebookAsker
from distmagic.names import owner
from distmagic.planning.jobs import choose
from distmagic.request.allocation import SlurmRequest
from distmagic.session.session import Session
from tests import REPOSITORY
from tests.e2e import runner
from tests.e2e.programs import count
from tests.e2e.runner import Watch, as_value, at_work
from tests.e2e.slurm_cells import (
    TWO,
    fill,
    kernel_of_its_own,
    kernel_program,
    run,
    say_until,
    state_of,
)
from tests.lab import wait_until
from tests.lab.slurm import LOOK_S, SlurmLab

pytestmark = [pytest.mark.needs("lab", "slurm"), pytest.mark.usefixtures("kernel")]

ASKER = NotebookAsker(can_ask=False)
SMALL = dataclasses.replace(TWO, options=(("cpus-per-task", "2"),))


# ---- one kernel is gone


def test_a_kernel_that_is_killed_leaves_no_allocation(slurm):
    with kernel_of_its_own(slurm, nodes=1) as process:
        say_until(process, "over")
        (job,) = slurm.jobs()
        process.kill()
    wait_until(
        lambda: not slurm.jobs(), "the allocation to end with its lease", every_s=LOOK_S
    )
    assert "JobState=COMPLETED" in slurm.command("scontrol", "show", "job", job)


def test_a_kernel_that_exits_gives_its_nodes_back_at_once(slurm):
    with kernel_of_its_own(slurm, nodes=1, lease_s=300.0) as process:
        say_until(process, "over")
        process.send_signal(signal.SIGINT)
    # Long before its lease ends.
    wait_until(lambda: not slurm.jobs(), "the allocation to end", every_s=LOOK_S)


def test_a_kernel_that_is_killed_while_its_job_is_pending_leaves_none(slurm):
    other = fill(slurm)
    with kernel_of_its_own(slurm, nodes=1, first_lease_s=2.0) as process:
        say_until(process, "(Resources)")
        (job,) = set(slurm.jobs()) - {other}
        process.kill()
    slurm.command("scancel", other)
    wait_until(lambda: not slurm.jobs(), "the job to start and to end", every_s=LOOK_S)
    assert state_of(slurm, job) == "COMPLETED"


def test_a_detached_job_holds_its_nodes_when_its_kernel_is_killed(slurm, kernel):
    go = slurm.lab.folder / "go-killed"
    with kernel_of_its_own(slurm, waits_for=str(go), detach=True) as process:
        name = say_until(process, "over").split()[1]
        (job,) = slurm.jobs()
        process.kill()
    _find_and_attach(slurm, kernel, job, name, go)


def _find_and_attach(
    slurm: SlurmLab, kernel: Session, job: str, name: str, go: Path
) -> None:
    """Find job `name` in the allocation `job`, follow it, and let it end."""
    way = runner.access(slurm.lab)
    slurms = kernel.allocations.pool("slurm")
    _, listed = slurms.listed(SlurmRequest(login="dm1"), way, ASKER)
    assert listed[0] == job
    request = SlurmRequest(login="dm1", job=job)
    hosts = kernel.allocations.get(request, way, ASKER, owner()).wait(ASKER, print)
    # others of earlier tests have ended
    there = choose(kernel.housekeeping.jobs(kernel.reach(hosts, way, ASKER)), name)
    screen = Watch(at_work(2), go.touch)
    found = kernel.attach(kernel.reach(hosts, way, ASKER), there, screen)
    assert dict(found.results) == {0: str(go), 1: str(go)}


# ---- several kernels, several allocations


def test_two_kernels_and_two_allocations_on_the_same_nodes(slurm):
    """Three allocations in all: each has keepers of its own, and none hears of the others."""
    with kernel_of_its_own(slurm, seconds=6.0, lease_s=60.0) as process:
        say_until(process, "at work")
        first = run(slurm, as_value(count), 0.1, allocation=SMALL)
        named = dataclasses.replace(SMALL, options=(*SMALL.options, ("nice", "1")))
        second = run(slurm, as_value(count), 1.0, allocation=named)
        assert len(slurm.jobs()) == 3
        for found in (first, second):
            assert [node.host for node in found.state.nodes] == list(slurm.names)
        assert "{0: 60, 1: 60}" in say_until(process, "over")
        process.send_signal(signal.SIGINT)
    wait_until(
        lambda: len(slurm.jobs()) == 2,
        "the other kernel's allocation to end",
        every_s=LOOK_S,
    )


def test_on_the_log_in_node_itself(slurm):
    command = kernel_program("/dev/null", login="", nodes=1, stays=False)
    done = slurm.login.exec(
        ["env", f"PYTHONPATH={REPOSITORY}", *command], timeout_s=200
    )
    assert "over" in done.stdout, done.stderr
    slurm.login.exec(["rm", "-rf", ".distmagic"])  # its notebook was on the log-in node
    wait_until(lambda: not slurm.jobs(), "the allocation to end", every_s=LOOK_S)


def test_a_kernel_on_a_node_reaches_the_other_nodes_of_its_job(slurm):
    """A JupyterLab that is a step on the first node: Slurm's variables are around it, and no --overlap of its own."""
    program = " ".join(
        shlex.quote(word)
        for word in kernel_program(
            "/dev/null", login="", nodes=1, job="$SLURM_JOB_ID", stays=False
        )
    )
    step = f"srun -N1 -n1 -w {slurm.names[0]} env PYTHONPATH={REPOSITORY} {program}"
    step = step.replace("$SLURM_JOB_ID", "'$SLURM_JOB_ID'")
    script = f"#!/bin/sh\n{step} >/tmp/said 2>&1\necho ended >>/tmp/said\nsleep 600\n"
    argv = ["sbatch", "--parsable", "-N2", "-c4", "-o", "/dev/null"]
    done = slurm.login.exec(argv, stdin=script)
    assert done.returncode == 0, done.stderr

    def said() -> str:
        return slurm.nodes[0].exec(["sh", "-c", "cat /tmp/said"]).stdout

    wait_until(lambda: "ended" in said(), "the step to end", every_s=LOOK_S)
    assert "over {0: 5, 1: 5}" in said(), said()
    slurm.command("scancel", done.stdout.strip())
    slurm.nodes[0].exec(["rm", "/tmp/said"])
