"""The same script or notebook on every node of a job: node 0 leads, the others follow. Real Slurm; the others' variables, played."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.lab.slurm import SlurmLab

pytestmark = [pytest.mark.needs("lab", "slurm"), pytest.mark.timeout(180)]

SECRET = "a secret of these nodes alone"
TRAIN = """\
import os, sys
import distmagic
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
for step in distmagic.track(range(3)):
    dist.all_reduce(total)
    distmagic.report(step=step + 1, total=3, loss=1.0)
print("seen", os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1:], "DISTMAGIC_SECRET" in os.environ, flush=True)
dist.destroy_process_group()
"""
DISTMAGIC = (sys.executable, "-m", "distmagic.cli")


@pytest.fixture
def folder(slurm: SlurmLab) -> Iterator[Path]:
    """A folder that all nodes see, with a program in it; afterwards nothing is left, in Slurm or on any host."""
    found = slurm.lab.folder / "inside"
    found.mkdir(exist_ok=True)
    (found / "train.py").write_text(TRAIN)
    yield found
    slurm.assert_clean()


def srun(
    slurm: SlurmLab,
    folder: Path,
    *words: str,
    secret: str = SECRET,
    options: str = "-N2 --ntasks-per-node=1",
):
    """Run a command in a step of a job; lines of its output begin with the number of the task."""
    command = [
        "env", f"PYTHONPATH={REPOSITORY}", f"DISTMAGIC_SECRET={secret}", "srun", "--label", "-c2", f"--chdir={folder}",
        *shlex.split(options), *words,
    ]  # fmt: skip
    return slurm.login.exec(command, timeout_s=150)


def test_a_script_on_two_nodes(slurm: SlurmLab, folder: Path) -> None:
    done = srun(
        slurm, folder, *DISTMAGIC, "run", "--nproc-per-node", "2", "train.py", "50"
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
