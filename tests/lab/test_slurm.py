"""Slurm of the lab itself: what the other tests rely on."""

from __future__ import annotations

import subprocess

import pytest

from distmagic.systems.slurm.nodelist import expand
from tests.lab import wait_until
from tests.lab.slurm import UID, USER, has_cgroups

pytestmark = pytest.mark.needs("lab", "slurm")


def test_a_job_runs_on_every_node_and_none_on_the_log_in_node(slurm):
    told = slurm.command(
        "srun",
        "-N2",
        "--ntasks-per-node=1",
        "sh",
        "-c",
        "echo $SLURMD_NODENAME $(hostname)",
    )
    pairs = {tuple(line.split()) for line in told.splitlines()}
    assert pairs == set(
        zip(slurm.names, (host.name for host in slurm.nodes), strict=True)
    )


def test_an_ordinary_user_has_a_home_and_jobs_of_his_own(slurm):
    argv = [
        "ssh",
        "-F",
        str(slurm.lab.ssh_config),
        "-l",
        USER,
        slurm.login.name,
        "pwd; srun -N1 id -u",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [f"/home/{USER}", str(UID)], done.stderr


def test_accounting_is_off_so_that_nothing_of_ours_can_need_it(slurm):
    assert "accounting storage is disabled" in slurm.login.exec(["sacct"]).stderr


def test_gpus_are_counted(slurm):
    told = slurm.command(
        "srun", "-N1", "--gpus-per-node=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"
    )
    assert told.split() == ["0,1"]


@pytest.mark.skipif(
    not has_cgroups(),
    reason="no cgroups here: Slurm tracks processes by proctrack/linuxproc",
)
def test_a_steps_end_kills_what_it_has_started(slurm):
    assert slurm.tracks_by == "proctrack/cgroup"
    slurm.command(
        "srun",
        "-N1",
        "-w",
        slurm.names[0],
        "sh",
        "-c",
        "setsid sleep 1234 >/dev/null 2>&1 </dev/null &",
    )
    left = [p for p in slurm.nodes[0].processes() if p.cmdline == ("sleep", "1234")]
    assert left == []


def test_the_controller_can_be_away(slurm):
    slurm.stop_controller()
    assert "Unable to contact slurm controller" in slurm.login.exec(["squeue"]).stderr
    slurm.start_controller()
    wait_until(
        lambda: slurm.login.exec(["squeue"]).returncode == 0,
        "the controller to be back",
    )


@pytest.mark.parametrize(
    "text",
    ["a[1-3,07-10]b[1-2],c", "x[1-2][1-2]", "gpu[008-011],z", "a", "p1n[1-2],p1n7"],
)
def test_names_are_written_out_as_scontrol_does(slurm, text):
    assert expand(text) == tuple(
        slurm.command("scontrol", "show", "hostnames", text).split()
    )
