"""Exported folders, run as they are: sbatch files by real Slurm, torchrun's commands on hosts of the lab."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.builders.exports import HOSTILE
from tests.lab import Lab
from tests.lab.host import LabHost
from tests.lab.slurm import SlurmLab

pytestmark = [pytest.mark.needs("lab"), pytest.mark.timeout(240)]

# Each rank leaves what it was given and what it found in a file beside it.
TRAIN = """
import json
import os
import socket
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([rank + 1])
dist.all_reduce(total)
found = {
    "total": int(total),
    "world": dist.get_world_size(),
    "host": socket.gethostname(),
    "args": sys.argv[1:],
    "local_rank": os.environ["LOCAL_RANK"],
    "variables": {name: value for name, value in os.environ.items() if name.startswith("MY_")},
}
with open(f"rank-{rank}.json", "w") as file:
    json.dump(found, file)
if sys.argv[1:] == ["fail"] and rank == 1:
    sys.exit(7)
dist.destroy_process_group()
"""
VARIABLES = {f"MY_{place}": value for place, value in enumerate(HOSTILE)}


@pytest.fixture
def export(tmp_path: Path) -> Iterator[Any]:
    """Return a function that exports TRAIN with these flags and arguments to a folder that all hosts see."""
    made: list[Path] = []

    def write(lab: Lab, *flags: str, args: tuple[str, ...] = ()) -> Path:
        (tmp_path / "train.py").write_text(TRAIN)
        folder = lab.folder / "exports" / tmp_path.name
        made.append(folder)
        system, *others = flags
        words = ["--export", system, str(folder), "--python", "python3", *others]
        command = [
            sys.executable,
            "-m",
            "distmagic.cli",
            "run",
            *words,
            "train.py",
            *args,
        ]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        return folder

    yield write
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


def results(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what each rank has left, by rank; and take it away for the next run."""
    found = {}
    for path in sorted((folder / "program").glob("rank-*.json")):
        found[int(path.stem.partition("-")[2])] = json.loads(path.read_text())
        path.unlink()
    return found


def submit(slurm: SlurmLab, folder: Path, *words: str) -> tuple[int, str]:
    """Submit a file of the folder as a user does; return the job's exit code and all that it printed."""
    line = f"cd {folder} && rm -f *.out && exec sbatch --wait {' '.join(words)}"
    done = slurm.login.exec(["bash", "-c", line], timeout_s=150)
    printed = "".join(path.read_text() for path in folder.glob("*.out"))
    return done.returncode, done.stdout + done.stderr + printed


@pytest.mark.needs("slurm")
@pytest.mark.parametrize("file", ["job.sbatch", "ranks.sbatch"])
def test_both_sbatch_files_run_as_they_are(
    slurm: SlurmLab, export: Any, file: str
) -> None:
    folder = export(
        slurm.lab,
        "slurm",
        "--nodes",
        "2",
        "--nproc-per-node",
        "2",
        "--cpus-per-task",
        "4",
    )
    code, printed = submit(slurm, folder, file)
    assert code == 0, printed
    found = results(folder)
    assert [(found[rank]["host"], found[rank]["local_rank"]) for rank in range(4)] == [
        ("dm2", "0"),
        ("dm2", "1"),
        ("dm3", "0"),
        ("dm3", "1"),
    ]
    assert {(one["total"], one["world"]) for one in found.values()} == {(10, 4)}


@pytest.mark.needs("slurm")
def test_one_option_of_sbatch_changes_the_number_of_nodes(
    slurm: SlurmLab, export: Any
) -> None:
    folder = export(slurm.lab, "slurm")
    code, printed = submit(slurm, folder, "--nodes", "2", "job.sbatch")
    assert code == 0, printed
    assert {one["world"] for one in results(folder).values()} == {2}


@pytest.mark.needs("slurm")
@pytest.mark.parametrize("file", ["job.sbatch", "ranks.sbatch"])
def test_hostile_values_reach_every_rank_of_slurm(
    slurm: SlurmLab, export: Any, file: str
) -> None:
    variables = [
        word
        for name, value in VARIABLES.items()
        for word in ("--env", f"{name}={value}")
    ]
    comment = """it's "$HOME" `id` \\ #c ü"""
    folder = export(
        slurm.lab, "slurm", "--slurm", f"admin-comment={comment}", *variables,
        "--setup", "export MY_SETUP='a  b'", "--cpus-per-task", "2", args=HOSTILE,
    )  # fmt: skip
    code, printed = submit(slurm, folder, file)
    assert code == 0, printed
    (found,) = results(folder).values()
    assert found["args"] == list(HOSTILE)
    assert found["variables"] == {**VARIABLES, "MY_SETUP": "a  b"}
    assert (folder / "environment.sh").stat().st_mode & 0o777 == 0o600


@pytest.mark.needs("slurm")
@pytest.mark.parametrize("file", ["job.sbatch", "ranks.sbatch"])
def test_a_rank_that_fails_ends_the_whole_job(
    slurm: SlurmLab, export: Any, file: str
) -> None:
    folder = export(
        slurm.lab, "slurm", "--nodes", "2", "--cpus-per-task", "2", args=("fail",)
    )
    code, printed = submit(slurm, folder, file)
    assert code != 0
    assert (
        "exitcode  : 7" in printed
        if file == "job.sbatch"
        else "Exited with exit code 7" in printed
    )
    slurm.assert_clean()


@pytest.mark.needs("slurm")
def test_a_file_submitted_elsewhere_says_so(slurm: SlurmLab, export: Any) -> None:
    folder = export(slurm.lab, "slurm")
    away = slurm.lab.folder / "exports"
    done = slurm.login.exec(
        [
            "bash",
            "-c",
            f"cd {away} && sbatch --wait {folder}/job.sbatch; cat {away}/*.out; rm {away}/*.out",
        ]
    )
    assert "node.sh is not here: run sbatch in the folder of this file" in done.stdout


def at_once(
    hosts: tuple[LabHost, ...], lines: list[str]
) -> list[subprocess.CompletedProcess[str]]:
    """Run a line of bash on each host, all at the same time."""
    with ThreadPoolExecutor(len(lines)) as pool:
        return list(
            pool.map(
                lambda host, line: host.exec(["bash", "-c", line], timeout_s=120),
                hosts,
                lines,
            )
        )


@pytest.mark.parametrize(
    "scripts", [("node-0.sh", "node-1.sh"), ("any-node.sh", "any-node.sh")]
)
def test_torchruns_commands_by_hand(
    lab: Lab, export: Any, scripts: tuple[str, str]
) -> None:
    folder = export(
        lab,
        "torchrun",
        "--hosts",
        "dm1:2,dm2:2",
        "--env",
        f"MY_1={HOSTILE[4]}",
        args=HOSTILE,
    )
    done = at_once(lab.hosts[:2], [f"bash {folder}/{script}" for script in scripts])
    assert [one.returncode for one in done] == [0, 0], done
    found = results(folder)
    assert sorted((one["host"], one["local_rank"]) for one in found.values()) == [
        ("dm1", "0"),
        ("dm1", "1"),
        ("dm2", "0"),
        ("dm2", "1"),
    ]
    assert {one["total"] for one in found.values()} == {10}
    assert found[3]["args"] == list(HOSTILE)
    assert found[3]["variables"] == {"MY_1": HOSTILE[4]}
