"""Exported folders, run as they are: sbatch files by real Slurm, torchrun's commands on hosts of the lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.exports import HOSTILE
from tests.e2e.exports import VARIABLES, Node, at_once, check_four_ranks, results
from tests.e2e.slurm_cells import end_of
from tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.needs("lab")

FILES = ("job.sbatch", "ranks.sbatch")


def submit(slurm: SlurmLab, folder: Path, *words: str) -> tuple[int, str]:
    """Submit a file of the folder as a user does; return the job's exit code and all that it printed."""
    line = f"cd {folder} && rm -f *.out && exec sbatch --parsable {' '.join(words)}"
    done = slurm.login.exec(["bash", "-c", line])
    assert done.returncode == 0, done
    code = end_of(slurm, done.stdout.strip())
    printed = "".join(path.read_text() for path in folder.glob("*.out"))
    return int(code), done.stderr + printed


@pytest.mark.needs("slurm")
@pytest.mark.parametrize("a_node", [pytest.param(1, marks=pytest.mark.quick), 2])
def test_both_sbatch_files_run_as_they_are_and_hostile_values_reach_every_rank(
    slurm, export, a_node
):
    variables = [
        word
        for name, value in VARIABLES.items()
        for word in ("--env", f"{name}={value}")
    ]
    key = """it's "$home" `id` \\ #c ü"""  # which Slurm keeps, in small letters
    setup = "export MY_SETUP='a  b' MY_KEY=\"$(squeue -h -j $SLURM_JOB_ID -o %w)\""
    folder = export(
        slurm.lab, "slurm", "--nodes", "2", "--nproc-per-node", str(a_node), "--cpus-per-task", "4",
        "--slurm", f"wckey={key}", *variables, "--setup", setup, args=HOSTILE,
    )  # fmt: skip
    assert (folder / "environment.sh").stat().st_mode & 0o777 == 0o600
    places = [(host, str(rank)) for host in ("dm2", "dm3") for rank in range(a_node)]
    for file in FILES:
        code, printed = submit(slurm, folder, file)
        assert code == 0, printed
        found = results(folder)
        where = [(found[rank]["host"], found[rank]["local_rank"]) for rank in found]
        assert where == places, file
        for one in found.values():
            assert (one["total"], one["world"]) == (sum(found) + len(found), 2 * a_node)
            assert one["args"] == list(HOSTILE)
            assert one["variables"] == {**VARIABLES, "MY_SETUP": "a  b", "MY_KEY": key}


@pytest.mark.needs("slurm")
def test_one_option_of_sbatch_changes_the_number_of_nodes(slurm, export):
    folder = export(slurm.lab, "slurm")
    code, printed = submit(slurm, folder, "--nodes", "2", "job.sbatch")
    assert code == 0, printed
    assert {one["world"] for one in results(folder).values()} == {2}


@pytest.mark.needs("slurm")
def test_a_rank_that_fails_ends_the_whole_job(slurm, export):
    folder = export(
        slurm.lab, "slurm", "--nodes", "2", "--cpus-per-task", "2", args=("fail",)
    )
    told = ("exitcode  : 7", "Exited with exit code 7")
    for file, words in zip(FILES, told, strict=True):
        code, printed = submit(slurm, folder, file)
        assert code != 0
        assert words in printed
        slurm.assert_clean()


def test_torchruns_commands_by_hand(lab, export):
    folder = export(
        lab,
        "torchrun",
        "--hosts",
        "dm1:2,dm2:2",
        "--env",
        f"MY_1={HOSTILE[4]}",
        args=HOSTILE,
    )
    done = at_once(lab.hosts[:2], [Node(f"bash {folder}/any-node.sh", {})] * 2)
    assert [one.returncode for one in done] == [0, 0], done
    found = results(folder)
    check_four_ranks(found)
    assert found[3]["args"] == list(HOSTILE)
    assert found[3]["variables"] == {"MY_1": HOSTILE[4]}
