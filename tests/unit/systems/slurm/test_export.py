"""What is submitted to Slurm, both forms; the files are run on real Slurm in tests/e2e/test_exports.py."""

import re
import shlex

import pytest

from distmagic.errors import UsageError
from distmagic.exports import systems
from tests import REPOSITORY
from tests.builders.exports import HOSTILE, job, shown, texts
from tests.builders.shell import refusal

GOLDEN = REPOSITORY / "tests/golden/exports"


def test_the_files_of_a_job_with_gpus():
    whole = job(
        "slurm",
        name="Mein Lauf 2",
        nodes=2,
        options=(
            ("gpus-per-node", "4"),
            ("partition", "gpu"),
            ("time", "2:00:00"),
            ("account", "my team"),
            ("cpus-per-task", "16"),
            ("mem", "64G"),
            ("exclusive", ""),
        ),
        setup="module load cuda",
        spec={"env": (("LR", "0.1"), ("WANDB_API_KEY", "it's secret"))},
    )
    assert shown(systems.files(whole)) == (GOLDEN / "slurm.txt").read_text()


def test_restarts_across_nodes_need_c10d_whose_host_is_the_first_node():
    node = texts(systems.files(job("slurm", nodes=2, spec={"max_restarts": 3})))[
        "node.sh"
    ]
    assert "--rdzv-backend=c10d" in node
    assert '--rdzv-endpoint="$MASTER_ADDR":"$MASTER_PORT"' in node
    assert '--rdzv-conf=is_host="$IS_HOST"' in node
    assert "IS_HOST=$((SLURM_NODEID == 0))" in node


def test_an_interpreter_in_the_home():
    found = texts(systems.files(job("slurm", python="~/my env/bin/python")))
    python = "\"$HOME\"'/my env/bin/python'"
    assert f"exec {python} run_node.py \\\n" in found["node.sh"]
    assert f"exec {python} -u run_rank.py cell.py 3\n" in found["rank.sh"]


@pytest.mark.parametrize(
    "value", [one for one in HOSTILE if not re.search(r"[\n\r\0]", one)]
)
def test_a_hostile_option_is_one_line_that_says_nothing_else(value):
    batch = texts(systems.files(job("slurm", options=(("comment-x", value),))))[
        "job.sbatch"
    ]
    lines = [line for line in batch.split("\n") if "comment-x" in line]
    if value:
        (line,) = lines
        told = line.removeprefix("#SBATCH --comment-x=")
        assert shlex.split(told) == [value]
    else:
        assert lines == ["#SBATCH --comment-x"]


@pytest.mark.parametrize(
    ("script", "change", "message"),
    [
        ("node.sh", {"MASTER_ADDR": None}, "MASTER_ADDR: is not set: job.sbatch sets it"),
        ("node.sh", {"MASTER_PORT": ""}, "MASTER_PORT: is not set: job.sbatch sets it"),
        ("node.sh", {"SLURM_JOB_ID": None}, "SLURM_JOB_ID: is not set: Slurm sets it"),
        ("node.sh", {"SLURM_NNODES": None}, "SLURM_NNODES: is not set: Slurm sets it"),
        ("node.sh", {"SLURM_NODEID": None}, "SLURM_NODEID: is not set: Slurm sets it"),
        ("node.sh", {"SLURM_NODEID": "2"}, "SLURM_NODEID is 2, of 2 nodes"),
        ("rank.sh", {"MASTER_ADDR": None}, "MASTER_ADDR: is not set: ranks.sbatch sets it"),
        ("rank.sh", {"SLURM_PROCID": None}, "SLURM_PROCID: is not set: Slurm sets it"),
        ("rank.sh", {"SLURM_LOCALID": None}, "SLURM_LOCALID: is not set: Slurm sets it"),
        ("rank.sh", {"SLURM_NTASKS": None}, "SLURM_NTASKS: is not set: Slurm sets it"),
        ("rank.sh", {"SLURM_NTASKS_PER_NODE": None}, "SLURM_NTASKS_PER_NODE: is not set"),
        ("rank.sh", {"SLURM_PROCID": "x"}, "SLURM_PROCID is x, of 4 tasks"),
    ],
)  # fmt: skip
def test_what_a_task_lacks_is_named_at_once(script, change, message):
    given = {
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    text = texts(systems.files(job("slurm", nodes=2)))[script]
    assert message in refusal(text, given, change)


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": {"nproc_per_node": "gpu"}},
        {"spec": {"rdzv_endpoint": "a:1"}},
        {"spec": {"nnodes": (1, 2)}},
        {"spec": {"cwd": "/x"}},
        {"spec": {"env": (("A", "\udcff"),)}},
        {"options": (("gpus", "8"),)},
        {"options": (("gpus-per-node", "many"),)},
        {"options": (("cpus-per-task", "0"),)},
        {"options": (("mem", "much"),)},
        {"nodes": 0},
        {"setup": "\0"},
    ], ids=str,
)  # fmt: skip
def test_what_can_not_be_exported(changes, golden):
    with golden.raises(UsageError):
        systems.files(job("slurm", **changes))
