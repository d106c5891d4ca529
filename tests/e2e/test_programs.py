"""Programs of the shapes that people have run unchanged on hosts, and do there what torchrun has them do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distmagic.api import session
from tests import REPOSITORY
from tests.e2e.scripts import run

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]
SHAPES = REPOSITORY / "tests" / "e2e" / "shapes"
# Two hosts that keep torch loaded, as a notebook's do.
TWO = {"hosts": "dm1:1,dm2:1", "warm_idle_s": 900.0}


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that makes a copy of a folder of programs the current directory."""

    def enter(name: str) -> Path:
        shutil.copytree(SHAPES / name, tmp_path / "programs")
        monkeypatch.chdir(tmp_path / "programs")
        return tmp_path / "programs"

    return enter


def test_a_program_goes_on_from_its_snapshot_and_the_snapshot_comes_back(
    warm_lab, inside
):
    folder = inside("snapshots")
    first = run(warm_lab, "--fresh train.py 2 1 --batch_size 16", **TWO)
    assert first.logs(0, "stdout").splitlines() == [
        "[rank 0] epoch 0 | steps: 8",
        "[rank 0] epoch 1 | steps: 8",
    ]
    second = run(warm_lab, "--fetch snapshot.pt train.py 3 1 --batch_size 16", **TWO)
    for rank in (0, 1):  # each has its own snapshot: their hosts share no disk
        assert second.logs(rank, "stdout").splitlines() == [
            "Resuming training from snapshot at epoch 2",
            f"[rank {rank}] epoch 2 | steps: 8",
        ]
    assert (folder / "snapshot.pt").stat().st_size > 1000


def test_a_program_whose_settings_are_its_globals(warm_lab, inside):
    folder = inside("configured")
    prepare = [sys.executable, "data/words/prepare.py"]
    subprocess.run(prepare, check=True, cwd=folder)
    line = "--fresh --fetch out-small train.py config/small.py --batch_size=8"
    found = run(warm_lab, line, **TWO)
    out = found.logs(0, "stdout").splitlines()
    assert out[0] == "settings of config/small.py"
    assert [words.partition(":")[0] for words in out[1:]] == [
        "iter 0",
        "iter 10",
        "iter 20",
    ]
    assert found.logs(1, "stdout") == "settings of config/small.py\n"
    printed = [
        (row["rank"], row["step"], f"{row['loss']:.4f}") for row in found.metrics
    ]
    losses = [words.split()[3].rstrip(",") for words in out[1:]]
    assert printed == list(zip([0, 0, 0], [0, 10, 20], losses, strict=True))
    assert (folder / "out-small" / "ckpt.pt").stat().st_size > 1000


def test_workers_of_a_loader_in_each_way_to_start_them(warm_lab, inside):
    inside(".")
    line = "loaders.py fork spawn forkserver"
    found = run(warm_lab, line, hosts="dm1:2", warm_idle_s=900.0)
    expected = ["fork 280.0", "spawn 280.0", "forkserver 280.0"]
    for rank in (0, 1):
        assert found.logs(rank, "stdout").splitlines() == expected


def test_sharded_and_tensor_parallel_and_a_distributed_checkpoint(make_lab, inside):
    lab = make_lab(2, shared_home=True)  # a distributed checkpoint is one for all ranks
    inside(".")
    found = run(lab, "sharded.py 20 ck", hosts="dm1:2,dm2:2", warm_idle_s=900.0)
    for rank in range(4):
        assert found.logs(rank, "stdout") == "loaded True True\n"
    files = [file.path for file in found.files(0, "ck")]
    assert "ck/.metadata" in files
    assert len([path for path in files if path.endswith(".distcp")]) == 4
    session().close()
    lab.assert_clean()
