"""Programs of Accelerate, Lightning, Transformers and hydra run unchanged, and what they log are metrics.

Hosts of the lab find these packages where this Python has them, by PYTHONPATH. Transformers' and hydra's run on hosts that
share their home, those of Accelerate and Lightning on hosts with homes of their own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from distmagic.api import session
from distmagic.outcome.run import Run
from tests import REPOSITORY
from tests.e2e.scripts import run
from tests.lab import Lab
from tests.system.packages import folder_of

pytestmark = pytest.mark.needs("lab")
SHAPES = REPOSITORY / "tests" / "e2e" / "shapes"


def run_with(lab: Lab, package: str, line: str) -> Run:
    """Run a script on two hosts, whose Pythons find `package` where this one does."""
    line = f"--env PYTHONPATH={folder_of(package)} --fresh {line}"
    return run(lab, line, hosts="dm1:1,dm2:1")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the programs, which is the current directory."""
    folder = tmp_path / "programs"
    shutil.copytree(SHAPES / "frameworks", folder)
    shutil.copytree(SHAPES / "hydra", folder / "hydra")
    monkeypatch.chdir(folder)
    return folder


def test_accelerate(ended, program):
    line = "--fetch out/** with_accelerate.py --num_epochs 2"
    found = run_with(ended, "accelerate", line)
    out = found.logs(0, "stdout")
    assert "processes 2, steps 4\n" in out
    assert "mean of 2: True\n" in out
    logged = [row for row in found.metrics if row["rank"] == 0]
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all("train_loss" in row for row in logged)
    assert (program / "out" / "model.safetensors").stat().st_size > 50


def test_lightning(ended, program):
    found = run_with(ended, "lightning", "with_lightning.py")
    assert "world 2 steps 8\n" in found.logs(0, "stdout")
    logged = [row for row in found.metrics if row.get("train_loss") is not None]
    assert len({row["step"] for row in logged if row["rank"] == 0}) == 8
    assert any(worker.bars for worker in found.state.workers.values())
    assert any("ckpt" in file.path for file in found.files(0, "out"))


def test_transformers_and_hydra_where_both_hosts_have_one_home(
    make_lab, program, monkeypatch
):
    lab = make_lab(2, shared_home=True)
    found = run_with(lab, "transformers", "with_transformers.py")
    assert "world 2 steps 4\n" in found.logs(0, "stdout")
    logged = [row for row in found.metrics if row["rank"] == 0 and "loss" in row]
    assert [row["step"] for row in logged] == [1, 2, 3, 4]
    saved = {file.path.rpartition("/")[2] for file in found.files(0, "out")}
    assert "model.safetensors" in saved
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= saved, "of both hosts in one place"
    monkeypatch.chdir(program / "hydra")
    found = run_with(lab, "hydra", "train.py lr=0.5 model=large")
    for rank in (0, 1):
        line = found.logs(rank, "stdout").splitlines()[-1]
        work = "/home/node/.distmagic/work/train"
        assert line == f"large lr=0.5 total=1.0 cwd={work}"
    session().close()
    lab.assert_clean()
