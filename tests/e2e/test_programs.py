"""Programs of the shapes that people have run unchanged on hosts, and do there what torchrun has them do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distmagic.api import session
from distmagic.render.overview import overview
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


def test_a_trainer_that_subcommands_and_a_file_of_settings_configure(warm_lab, inside):
    """The shape of LightningCLI: each rank finds out by itself who has started it, and the group is left to its end."""
    folder = inside("launched")
    line = "--fetch lightning_logs/** cli.py fit --config config.json"
    found = run(warm_lab, f"--fresh {line} --trainer.max_epochs=2", **TWO)
    kept = folder / "lightning_logs" / "version_0"
    assert '"max_epochs": 2' in (kept / "config.json").read_text()
    assert (kept / "epoch=1-step=8.ckpt").stat().st_size > 500
    logged = [row["step"] for row in found.metrics if "train_loss" in row]
    assert logged == [1, 2, 3, 4] * 2, "of rank 0 alone, by its bar"
    notes = [row.note for one in overview(found.state).groups for row in one.rows]
    assert not any("Sanity Checking" in note for note in notes)
    run(warm_lab, line, **TWO)
    assert (kept.parent / "version_1" / "config.json").exists()


def test_a_program_with_the_arguments_of_its_own_launcher(warm_lab, inside):
    """The shape of DeepSpeed: an operator that is built once a host, and a part of the parameters on each rank."""
    folder = inside("launched")
    line = (
        "--fresh --fetch loss.csv zero.py --deepspeed --deepspeed_config ds_config.json"
    )
    found = run(warm_lab, line, **TWO)
    # Both targets pull: 4 parameters end in the middle of 1 and 2.
    rows = [row.split(",") for row in (folder / "loss.csv").read_text().split()]
    middles = [1.5 * (1 - 0.8**step) for step in range(10)]
    assert [float(loss) for _, loss in rows] == pytest.approx(
        [4 * (middle - 1) ** 2 for middle in middles], abs=1e-5
    )
    assert [(row["rank"], row["step"]) for row in found.metrics] == [(0, 5), (0, 10)]


def test_a_block_that_makes_the_group_and_ends_it(warm_lab, inside):
    """The shape of Ignite with fire: a bar an epoch, whose numbers are metrics."""
    folder = inside("launched")
    line = (
        "--fresh --fetch best_model_*.pt parallel.py run --backend=gloo --max_epochs=3"
    )
    found = run(warm_lab, line, **TWO)
    text = found.logs(0, "stderr")
    assert "launcher.Parallel INFO: Initialized distributed launcher" in text
    assert text.rstrip().endswith("launcher.Parallel INFO: End of run")
    losses = [row["batch loss"] for row in found.metrics]
    assert len(losses) == 9
    assert losses == sorted(losses, reverse=True)
    assert len(list(folder.glob("best_model_*.pt"))) == 3


def test_a_module_of_a_repository_whose_folder_a_variable_names(warm_lab, inside):
    """The shape of nanochat: data and checkpoints are in one folder, and each rank saves its part of the optimizer."""
    inside("launched")
    line = "--fresh --env CHAT_BASE_DIR=base -m scripts.base_train --depth=1 --num_iterations=6"
    found = run(warm_lab, line, **TWO)
    printed = found.logs(0, "stdout").splitlines()
    assert [words[:16] for words in printed] == [
        f"step {n:05d}/00006" for n in range(6)
    ]
    assert found.logs(1, "stdout") == ""
    losses = [f"{row['loss']:.6f}" for row in found.metrics]
    assert losses == [words.split("loss: ")[1].split()[0] for words in printed]
    assert [row["step"] for row in found.metrics] == list(range(6))
    for rank, names in ((0, ["meta", "model", "optim"]), (1, ["optim"])):
        saved = found.files(rank, "base/base_checkpoints/d1")
        shown = [file.path.rpartition("/")[2].partition("_")[0] for file in saved]
        assert sorted(shown) == names


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
