"""What tests of jobs that run on every node have in common: the program and the notebook, and how they are started on each."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat

from tests import REPOSITORY
from tests.lab.host import LabHost
from tests.lab.slurm import SlurmLab

SECRET = "a secret of these nodes alone"
RUN = (sys.executable, "-m", "distmagic.cli", "run")
TRAIN = """\
import os, socket, sys
import distmagic
import torch
import torch.distributed as dist

if "fail" in sys.argv and os.environ["RANK"] == "1":
    raise ValueError("this rank fails")
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
for step in distmagic.track(range(3)):
    distmagic.report(step=step + 1, total=3, loss=1.0)
dist.barrier()
has_secret = "DISTMAGIC_SECRET" in os.environ
# One write: under torchrun by hand ranks share their node's output, and print writes the end of a line apart.
sys.stdout.write(f"SEEN rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, sum {total.item():g}, args {sys.argv[1:]}\\n")
sys.stdout.flush()
if has_secret and "alone" not in sys.argv:
    raise SystemExit("a rank sees the secret")
dist.destroy_process_group()
"""
# The cells of a notebook that goes well, and one that fails.
CELLS = (
    "%load_ext distmagic",
    """%%distributed -o run
def train():
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank, total.item()

train()""",
    "print('FIRST', dict(run.results))",
    "%%distributed -o again\ntrain()",
    "print('AGAIN', dict(again.results))",
)
FAILING = (
    "%%distributed\ndef train():\n    raise ValueError('this rank fails')\n\ntrain()"
)
# The arguments of a Python that executes a notebook, also beyond a cell that fails.
CONVERT = ("-m", "nbconvert", "--to", "notebook", "--execute", "--allow-errors")


def write_notebook(path: Path, cells: Sequence[str]) -> None:
    """Write a notebook with these cells of code."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    nbformat.write(notebook, path)


def written(folder: Path) -> dict[int, list[str]]:
    """Return what each cell shows in out0.ipynb and out1.ipynb, by node, where there are such; and take them away."""
    shown = {}
    for node in (0, 1):
        path = folder / f"out{node}.ipynb"
        if path.exists():
            cells = json.loads(path.read_text())["cells"]
            shown[node] = [
                json.dumps(cell["outputs"], ensure_ascii=False) for cell in cells
            ]
            path.unlink()
    return shown


def srun(
    slurm: SlurmLab,
    folder: Path,
    *words: str,
    options: str = "-N2 -n2",
    secret: str = SECRET,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a step of a job; each line of its output begins with the number of the task."""
    variables = [f"PYTHONPATH={REPOSITORY}", *([f"DISTMAGIC_SECRET={secret}"] if secret else [])]  # fmt: skip
    command = [
        "env",
        *variables,
        "srun",
        "--quiet",
        "--label",
        "-c2",
        f"--chdir={folder}",
    ]
    return slurm.login.exec([*command, *shlex.split(options), *words], timeout_s=150)


def on_all(
    hosts: Sequence[LabHost],
    folder: Path,
    variables: Sequence[Mapping[str, str]],
    words: Sequence[str],
) -> list[subprocess.CompletedProcess[str]]:
    """Run a command on all hosts at the same time, each with its own variables."""

    def on(host: LabHost, own: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        env = [f"{name}={value}" for name, value in own.items()]
        line = ["env", "-C", str(folder), f"PYTHONPATH={REPOSITORY}", *env, *words]
        return host.exec(line, timeout_s=150)

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(on, hosts, variables))
