"""The same script or notebook on every node of a job of real Slurm: node 0 leads, the others follow."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.e2e.nodes import (
    CELLS,
    CONVERT,
    FAILING,
    RUN,
    TRAIN,
    srun,
    write_notebook,
    written,
)
from tests.e2e.slurm_cells import end_of
from tests.lab.slurm import UID, USER, SlurmLab

pytestmark = pytest.mark.needs("lab", "slurm")


@pytest.fixture
def folder(slurm: SlurmLab) -> Iterator[Path]:
    """A folder that all nodes see, with a program in it; afterwards nothing is left, in Slurm or on any host."""
    found = slurm.lab.folder / "inside"
    found.mkdir()
    (found / "train.py").write_text(TRAIN)
    yield found
    try:
        slurm.assert_clean()
    finally:  # not before: what ends there may still write to it
        shutil.rmtree(found, ignore_errors=True)


def lines_of(task: int, output: str) -> str:
    """Return what one task has printed."""
    found = re.findall(rf"(?m)^{task}: ?(.*)$", output)
    return "\n".join(found)


def seen(text: str) -> list[str]:
    """Return what ranks have said of themselves."""
    return sorted(re.findall(r"SEEN (.*)$", text, re.MULTILINE))


@pytest.mark.quick
def test_a_script_on_two_nodes(slurm, folder):
    words = (*RUN, "--nproc-per-node", "2", "train.py", "50")
    done = srun(slurm, folder, *words)
    assert (done.returncode, done.stderr) == (0, ""), done
    lead, other = lines_of(0, done.stdout), lines_of(1, done.stdout)
    assert re.match(r"inside Slurm job \d+, node 0 of 2: leads", lead)
    assert seen(lead) == [f"rank {rank} of 4, sum 6, args ['50']" for rank in range(4)]
    first = slurm.names[0]
    for words in ("follows ", ""):
        assert re.search(
            rf"Slurm job \d+, node 1 of 2: {words}node 0, {first}, ", other
        )


def test_a_rank_that_fails_ends_all_nodes_with_its_error(slurm, folder):
    done = srun(slurm, folder, *RUN, "train.py", "fail")
    assert done.returncode == 1
    for task in (0, 1):
        told = lines_of(task, done.stderr)
        assert "rank 1 (" in told
        assert "ValueError: this rank fails" in told


PLAIN = """\
import os, sys
import distmagic
import torch
import torch.distributed as dist
from tqdm import tqdm

rank, count = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/met", rank=rank, world_size=count)
total = torch.tensor([float(rank)])
dist.all_reduce(total)
for step in distmagic.track(tqdm(range(3), desc="steps")):
    distmagic.report(step=step + 1, total=3, loss=1.0)
print(f"PLAIN rank {rank}, local {os.environ['SLURM_LOCALID']}, sum {total.item():g}", flush=True)
try:
    distmagic.run(print)
except distmagic.UsageError as error:
    print("REFUSED", error, flush=True)
dist.destroy_process_group()
"""


def test_one_task_a_rank(slurm, folder):
    """First a program without `distmagic run`, then one with it."""
    (folder / "plain.py").write_text(PLAIN)
    run = shlex.join([*RUN, "train.py", "alone"])
    both = f"{shlex.quote(sys.executable)} plain.py && exec {run}"
    done = srun(slurm, folder, "sh", "-c", both, options="-N2 -n3")
    assert done.returncode == 0, done
    assert len(re.findall(r"steps: 100%.* 3/3 ", done.stderr)) == 3, done.stderr
    plain = sorted(re.findall(r"PLAIN (.*)", done.stdout))
    assert [line.partition(",")[0] for line in plain] == ["rank 0", "rank 1", "rank 2"]
    assert [line.endswith("sum 3") for line in plain] == [True] * 3
    assert sorted(re.findall(r"local \d", done.stdout)) == [
        "local 0",
        "local 0",
        "local 1",
    ]
    for rank in range(3):
        told = lines_of(rank, done.stdout)
        refused = rf"REFUSED inside Slurm job \d+, node [01] of 2: .* {rank} of 3, "
        assert re.search(refused, told), told
        assert "--ntasks-per-node=1" in told
    assert seen(done.stdout) == [
        f"rank {rank} of 3, sum 3, args ['alone']" for rank in range(3)
    ]


# Where the home is a folder of this machine, as in the lab: to these nodes it is that of a network.
SHARED = """\
import sys
from pathlib import Path
from distmagic import cli
from distmagic.inside import shared_home
shared_home.NETWORK_TYPES = {shared_home._type_of(Path.home(), shared_home._MOUNTS)}
sys.exit(cli.main())
"""


def test_nodes_of_an_ordinary_user_prove_themselves_by_a_shared_home(slurm, folder):
    home = folder.with_name("a home")  # a script's folder may not have it in it
    home.mkdir()
    os.chown(home, UID, UID)
    (folder / "shared.py").write_text(SHARED)
    user = ["/bin/env", f"HOME={home}", f"USER={USER}"]
    user += ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    program = (sys.executable, f"{folder}/shared.py", "run", "train.py")
    done = srun(slurm, folder, *user, *program, secret="")
    assert (done.returncode, done.stderr) == (0, ""), done
    lead = lines_of(0, done.stdout)
    assert seen(lead) == [f"rank {rank} of 2, sum 1, args []" for rank in range(2)]
    assert "follows node 0" in lines_of(1, done.stdout)
    assert list((home / ".distmagic" / "inside").iterdir()) == []
    shutil.rmtree(home)


def test_without_any_proof_no_node_trains_alone_unless_that_is_meant(slurm, folder):
    refused = srun(slurm, folder, *RUN, "train.py", secret="")
    assert refused.returncode == 2, refused
    for task in (0, 1):
        told = lines_of(task, refused.stderr)
        assert f"node {task} of 2: DISTMAGIC_SECRET is not set" in told
        assert seen(lines_of(task, refused.stdout)) == []
    meant = srun(slurm, folder, *RUN, "--on", "none", "train.py", secret="")
    assert (meant.returncode, meant.stderr) == (0, ""), meant
    for task in (0, 1):
        assert seen(lines_of(task, meant.stdout)) == ["rank 0 of 1, sum 0, args []"]


def test_a_batch_script_is_on_one_node_alone_unless_it_says_on_slurm(slurm, folder):
    out = folder / "batch.out"
    on_slurm = ("--on", "slurm", "--python", sys.executable, "--cold", "train.py")
    ways = [("train.py",), ("--on", "none", "train.py"), on_slurm]
    lines = [f"{shlex.join([*RUN, *way])}; echo code $?" for way in ways]
    script = "\n".join(["#!/bin/sh", f"export PYTHONPATH={REPOSITORY}", *lines, ""])
    options = ["--parsable", "-N2", "-c2", f"--chdir={folder}", f"--output={out}"]
    done = slurm.login.exec(["sbatch", *options], stdin=script)
    assert end_of(slurm, done.stdout.strip()) == "0", done
    refused, alone, all_nodes, _ = re.split(
        r"^code (?:\d+)\n", out.read_text(), flags=re.MULTILINE
    )
    assert re.findall(r"^code (\d+)$", out.read_text(), re.MULTILINE) == ["2", "0", "0"]
    assert re.search(r"Inside Slurm job \d+: .*SLURM_STEP_ID", refused), refused
    assert seen(alone) == ["rank 0 of 1, sum 0, args []"]
    assert seen(all_nodes) == [f"rank {rank} of 2, sum 1, args []" for rank in range(2)]


def executed(
    slurm: SlurmLab, folder: Path, *notebooks: tuple[str, ...]
) -> tuple[int, dict[int, list[str]]]:
    """Execute a notebook on each node, the last one on all that are left.

    Return the exit code, and for each node that has written its notebook what its cells show.
    """
    for node in (0, 1):
        cells = notebooks[min(node, len(notebooks) - 1)]
        write_notebook(folder / f"train{node}.ipynb", cells)
    convert = shlex.join([sys.executable, *CONVERT])
    line = f"exec {convert} --output out$SLURM_NODEID.ipynb train$SLURM_NODEID.ipynb"
    done = srun(slurm, folder, "sh", "-c", line)
    return done.returncode, written(folder)


def test_a_notebook_on_two_nodes_is_written_on_both_whatever_fails(slurm, folder):
    """First all goes well, then a rank fails, and in the end the nodes have different cells."""
    first = (*CELLS, FAILING, CELLS[1])
    other = (*CELLS, FAILING, CELLS[1].replace("gloo", "nccl"))
    code, shown = executed(slurm, folder, first, other)
    assert (code, sorted(shown)) == (0, [0, 1])
    lead, follower = shown[0], shown[1]
    assert "FIRST {0: (0, 1.0), 1: (1, 1.0)}" in lead[2]
    assert "AGAIN {0: (0, 1.0), 1: (1, 1.0)}" in lead[4]
    assert "node 1 of 2: follows node 0" in follower[1]
    assert "FIRST {1: (1, 1.0)}" in follower[2], "its own rank's result alone"
    assert "AGAIN {1: (1, 1.0)}" in follower[4]
    for cells in (lead, follower):
        assert "WorkerFailed" in cells[5]
        assert "ValueError: this rank fails" in cells[5]
        assert "runs another cell or script" in cells[6]
