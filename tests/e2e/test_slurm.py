"""Real Slurm: a cell's hosts are the nodes of an allocation, reached through a log-in node."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distmagic.session.session import Session
from distmagic.state.model import RunState
from tests import REPOSITORY
from tests.e2e import runner
from tests.e2e.programs import count
from tests.e2e.runner import Watch, all_reduce, as_value, at_work
from tests.e2e.slurm_cells import (
    TWO,
    Noticing,
    fill,
    interrupt,
    kill,
    ours,
    run,
)
from tests.lab import wait_until
from tests.lab.slurm import USER, SlurmLab

pytestmark = [
    pytest.mark.needs("lab", "slurm"),
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("kernel"),
]


def test_ranks_on_two_nodes(slurm: SlurmLab) -> None:
    found = run(slurm, as_value(all_reduce), nproc_per_node=2)
    assert [found.results[rank]["host"] for rank in range(4)] == [
        "dm2",
        "dm2",
        "dm3",
        "dm3",
    ]
    assert {float(found.results[rank]["total"]) for rank in range(4)} == {6.0}
    assert [node.host for node in found.state.nodes] == list(slurm.names)


def test_the_next_cell_starts_in_the_same_allocation_and_warm(slurm: SlurmLab) -> None:
    way = runner.access(slurm.lab, warm_idle_s=60.0)
    run(slurm, as_value(all_reduce), access=way)
    (job,) = slurm.jobs()
    began = time.monotonic()
    run(slurm, as_value(all_reduce), access=way)
    took_s = time.monotonic() - began
    assert slurm.jobs() == (job,)
    assert took_s < 5.0, "it was not warm"


def test_an_ordinary_user(slurm: SlurmLab) -> None:
    request = dataclasses.replace(TWO, login=f"{USER}@dm1")
    found = run(slurm, as_value(all_reduce), allocation=request)
    assert {float(found.results[rank]["total"]) for rank in range(2)} == {1.0}


# ---- pending, refused


def test_a_pending_allocation_says_why_and_an_interrupt_cancels_it(
    slurm: SlurmLab,
) -> None:
    other = fill(slurm)
    screen = Noticing("(Resources)", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(slurm, as_value(all_reduce), screen=screen)
    assert "is pending: the nodes it needs are busy (Resources)." in screen.noticed
    wait_until(lambda: slurm.jobs() == (other,), "only the other job")
    slurm.command("scancel", other)


def test_a_pending_allocation_begins_when_its_nodes_are_free(slurm: SlurmLab) -> None:
    other = fill(slurm)
    screen = Noticing("(Resources)", lambda: slurm.command("scancel", other))
    found = run(slurm, as_value(all_reduce), screen=screen)
    assert found.state.phase == "done"
    assert any("its nodes are being set up" in notice for notice in screen.notices)


# ---- what ends, and what goes on


def test_ranks_see_nothing_of_the_keepers_task_and_their_jobs_number(
    slurm: SlurmLab,
) -> None:
    def variables() -> tuple[list[str], str, str]:
        import os

        odd = (
            "SLURM_PROCID",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_NTASKS",
            "SLURM_STEP_ID",
            "PMI_RANK",
        )
        return (
            [name for name in odd if name in os.environ],
            os.environ["SLURM_JOB_ID"],
            os.environ["CUDA_VISIBLE_DEVICES"],
        )

    request = dataclasses.replace(TWO, options=(("gpus-per-node", "2"),))
    found = run(slurm, as_value(variables), allocation=request, nproc_per_node=1)
    for rank in range(2):
        odd, job, gpus = found.results[rank]
        assert odd == []
        assert job.isdecimal()
        assert gpus == "0,1"


def test_sruns_that_are_killed_end_no_run_and_leave_no_step(slurm: SlurmLab) -> None:
    """An srun is two processes; the second cancels the step when the first is gone."""

    def kill_them() -> None:
        sruns = ours(slurm.login, "usher", "srun")
        both = {one.pid for one in sruns}
        kill(slurm.login, [one for one in sruns if one.ppid not in both])

    found = run(slurm, as_value(count), 5.0, screen=Watch(at_work(2), kill_them))
    assert dict(found.results) == {0: 50, 1: 50}
    wait_until(lambda: steps(slurm) <= 2, "the steps of the sruns to end")


def test_sruns_that_are_killed_with_what_cancels_their_steps_end_no_run(
    slurm: SlurmLab,
) -> None:
    """As when the log-in node dies: the next connections tell the keepers, which end what is left of those."""

    def kill_them() -> None:
        kill(slurm.login, ours(slurm.login, "usher", "srun"))

    found = run(slurm, as_value(count), 5.0, screen=Watch(at_work(2), kill_them))
    assert dict(found.results) == {0: 50, 1: 50}
    wait_until(lambda: steps(slurm) <= 2, "the steps of the sruns to end")


def test_ushers_that_are_killed_end_no_run_and_leave_no_step(slurm: SlurmLab) -> None:
    def kill_them() -> None:
        for host in slurm.nodes:
            kill(host, ours(host, "usher"))

    found = run(slurm, as_value(count), 5.0, screen=Watch(at_work(2), kill_them))
    assert dict(found.results) == {0: 50, 1: 50}
    wait_until(lambda: steps(slurm) <= 2, "the steps of the ushers to end")


def steps(slurm: SlurmLab) -> int:
    """Return how many steps of srun there are: the keepers have one, the lease another."""
    names = slurm.command("squeue", "-h", "--steps", "-o", "%i").split()
    return len([name for name in names if name.rpartition(".")[2].isdecimal()])


def test_the_log_in_node_is_cut_off_for_20_seconds(slurm: SlurmLab) -> None:
    class Cable(Watch):
        def __init__(self) -> None:
            super().__init__(at_work(2), self.cut)
            self.since = math.inf
            self.was_broken = False

        def cut(self) -> None:
            slurm.login.cut()
            self.since = time.monotonic()

        def show(self, state: RunState) -> None:
            super().show(state)
            self.was_broken |= any(node.broken for node in state.nodes)
            if time.monotonic() > self.since + 20.0:
                slurm.login.heal()

    screen = Cable()
    found = run(slurm, as_value(count), 24.0, screen=screen, node_lost_after_s=60.0)
    assert screen.was_broken
    assert dict(found.results) == {0: 240, 1: 240}


def test_a_script_in_a_terminal_gets_nodes_and_gives_them_back(
    slurm: SlurmLab, tmp_path: Path
) -> None:
    (tmp_path / "data.txt").write_text("some data")
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint('seen', os.environ['RANK'], sys.argv, os.getcwd(), open('data.txt').read())\n"
    )
    flags = [
        "--on",
        "slurm:dm1",
        "--nodes",
        "2",
        "--slurm",
        "cpus-per-task=4",
        "--name",
        "script",
    ]
    flags += ["--cold", "--ssh-config", str(slurm.lab.ssh_config)]
    done = subprocess.run(
        [sys.executable, "-m", "distmagic.cli", "run", *flags, "train.py", "50"], capture_output=True, text=True,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, timeout=150, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done
    for rank, name in enumerate(slurm.names):
        line = rf"\[rank {rank} {name}\] seen {rank} \['train.py', '50'\] \S+/\.distmagic/work/script some data\n"
        assert re.search(line, done.stdout), done.stdout
    wait_until(lambda: not slurm.jobs(), "the allocation to end", 10)


def test_an_unused_allocation_ends(slurm: SlurmLab, kernel: Session) -> None:
    request = dataclasses.replace(TWO, idle_s=2.0)
    run(slurm, as_value(all_reduce), allocation=request)
    wait_until(lambda: not slurm.jobs(), "the allocation to end", 20)
    found = run(slurm, as_value(all_reduce), allocation=request)
    assert found.state.phase == "done", "the next cell asks for new nodes"
