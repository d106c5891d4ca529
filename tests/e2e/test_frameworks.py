"""Programs of Accelerate, Lightning, Transformers and hydra run unchanged, and what they log are metrics.

Hosts of the lab find these packages where this Python has them, by PYTHONPATH. Transformers' runs on hosts that share
their home, those of Accelerate and Lightning on hosts with homes of their own, hydra's on both.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from distmagic.api import session
from distmagic.runner.outcome import Run
from tests import REPOSITORY
from tests.e2e import runner
from tests.e2e.scripts import run
from tests.lab import Lab
from tests.system.packages import folder_of

pytestmark = pytest.mark.needs("lab")
SHAPES = REPOSITORY / "tests" / "e2e" / "shapes"


def run_with(
    lab: Lab, package: str, line: str, screen: runner.Watch | None = None
) -> Run:
    """Run a script on two hosts, whose Pythons find `package` where this one does."""
    line = f"--env PYTHONPATH={folder_of(package)} --fresh {line}"
    return run(lab, line, hosts="dm1:1,dm2:1", screen=screen)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the programs, which is the current directory."""
    folder = tmp_path / "programs"
    shutil.copytree(SHAPES / "frameworks", folder)
    shutil.copytree(SHAPES / "hydra", folder / "hydra")
    monkeypatch.chdir(folder)
    return folder


def check_accelerate(lab: Lab, program: Path) -> None:
    """Run the program of Accelerate: what it logs, and the file that comes back."""
    found = run_with(
        lab, "accelerate", "--fetch out/** with_accelerate.py --num_epochs 2"
    )
    out = found.logs(0, "stdout")
    assert "processes 2, steps 4\n" in out
    assert "mean of 2: True\n" in out
    logged = [row for row in found.metrics if row["rank"] == 0]
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all("train_loss" in row for row in logged)
    assert (program / "out" / "model.safetensors").stat().st_size > 50


@pytest.mark.quick
def test_accelerate(ended, program):
    check_accelerate(ended, program)


def check_lightning(lab: Lab) -> None:
    """Run the program of Lightning: what it logs, its bars and its checkpoints."""
    screen = runner.Watch()
    found = run_with(lab, "lightning", "with_lightning.py", screen)
    assert "world 2 steps 8\n" in found.logs(0, "stdout")
    logged = [row for row in found.metrics if row.get("train_loss") is not None]
    assert len({row["step"] for row in logged if row["rank"] == 0}) == 8
    assert any(worker.bars for worker in found.state.workers.values())
    assert any("ckpt" in file.path for file in found.files(0, "out"))


def test_lightning(ended, program):
    check_lightning(ended)


def check_hydra(lab: Lab) -> None:
    """Run the program of hydra, whose folder is the current directory, and see where its ranks were."""
    found = run_with(lab, "hydra", "train.py lr=0.5 model=large")
    for rank in (0, 1):
        line = found.logs(rank, "stdout").splitlines()[-1]
        work = "/home/node/.distmagic/work/train"
        assert line == f"large lr=0.5 total=1.0 cwd={work}"


def test_hydra(ended, program, monkeypatch):
    monkeypatch.chdir(program / "hydra")
    check_hydra(ended)


def check_transformers(lab: Lab) -> set[str]:
    """Run the program of Transformers and see what it logs; return the names of the files that the first host has then."""
    found = run_with(lab, "transformers", "with_transformers.py")
    assert "world 2 steps 4\n" in found.logs(0, "stdout")
    logged = [row for row in found.metrics if row["rank"] == 0 and "loss" in row]
    assert [row["step"] for row in logged] == [1, 2, 3, 4]
    return {file.path.rpartition("/")[2] for file in found.files(0, "out")}


def test_transformers(ended, program):
    assert {"model.safetensors", "rng_state_0.pth"} <= check_transformers(ended)


def test_transformers_and_hydra_where_both_hosts_have_one_home(
    make_lab, program, monkeypatch
):
    lab = make_lab(2, shared_home=True)
    saved = check_transformers(lab)
    assert "model.safetensors" in saved
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= saved, "of both hosts in one place"
    monkeypatch.chdir(program / "hydra")
    check_hydra(lab)
    session().close()
    lab.assert_clean()


def test_accelerate_and_lightning_where_both_hosts_have_one_home(make_lab, program):
    lab = make_lab(2, shared_home=True)
    check_accelerate(lab, program)
    check_lightning(lab)
    session().close()
    lab.assert_clean()
