"""Slurm of the lab itself: what the other tests rely on."""

from __future__ import annotations

import pytest

from distmagic.systems.slurm.nodelist import expand
from tests.lab.slurm import has_cgroups

pytestmark = pytest.mark.needs("lab", "slurm")


def test_accounting_is_off_so_that_nothing_of_ours_can_need_it(slurm):
    assert "accounting storage is disabled" in slurm.login.exec(["sacct"]).stderr


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


@pytest.mark.parametrize(
    "text",
    ["a[1-3,07-10]b[1-2],c", "x[1-2][1-2]", "gpu[008-011],z", "a", "p1n[1-2],p1n7"],
)
def test_names_are_written_out_as_scontrol_does(slurm, text):
    assert expand(text) == tuple(
        slurm.command("scontrol", "show", "hostnames", text).split()
    )
