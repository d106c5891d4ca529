"""What Slurm's commands say when they fail, word for word as they were seen or stand in its source."""

from __future__ import annotations

import pytest

from distmagic.errors import AllocationEnded, PreflightError, Unreachable, UsageError
from distmagic.systems.slurm import srun_words
from distmagic.systems.slurm.refusals import is_unknown_job, refusal

BATCH = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: invalid partition specified: nope\n" + BATCH + "Invalid partition name specified",
        BATCH + "Invalid account or account/partition combination specified",
        BATCH + "Invalid qos specification",
        BATCH + "Invalid feature specification",
        BATCH + "Requested reservation is invalid",
        BATCH + "Invalid generic resource (gres) specification",
        BATCH + "Memory specification can not be satisfied",
        BATCH + "Requested node configuration is not available",
        BATCH + "Node count specification invalid",
        BATCH + "Requested time limit is invalid (missing or exceeds some limit)",
        "sbatch: unrecognized option '--frobnicate=1'\nTry \"sbatch --help\"",
        BATCH + "Something new",
    ],
)  # fmt: skip
def test_refusals(said, golden):
    error = refusal("login1", "sbatch", said)
    assert isinstance(error, UsageError)
    golden(error)


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        BATCH + "Socket timed out on send/recv operation",
        BATCH + "Slurm is initializing, please retry",
    ],
)
def test_a_controller_that_is_away_says_nothing_of_jobs(said):
    error = refusal("login1", "squeue", said)
    assert isinstance(error, Unreachable)
    assert "controller does not answer" in error.message
    assert "Running jobs continue" in error.hint


def test_a_machine_without_slurm(golden):
    error = refusal("this machine", "sbatch", "sh: 1: exec: sbatch: not found\n")
    assert isinstance(error, Unreachable)
    golden(error)


def test_a_value_that_is_taken_for_a_file_is_no_missing_program():
    said = "sbatch: error: slurm_open: /a/b: No such file or directory\nsbatch: error: Invalid node list\n"
    assert isinstance(refusal("login1", "sbatch", said), UsageError)


def test_a_job_that_is_no_longer_known():
    assert is_unknown_job("slurm_load_jobs error: Invalid job id specified")
    assert not is_unknown_job(
        "slurm_load_jobs error: Unable to contact slurm controller"
    )


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("srun: error: Slurm job 13 has expired\n", AllocationEnded),
        ("srun: error: Unable to confirm allocation for job 13: Invalid job id specified\n", AllocationEnded),
        ("srun: error: Unable to create step for job 13: Job/step already completing or completed\n", AllocationEnded),
        ("srun: error: Unable to create step for job 13: Memory required by task is not available\n", Unreachable),
        ("srun: error: Unable to create step for job 13: Unable to contact slurm controller (connect failure)\n", Unreachable),
        ("srun: unrecognized option '--overlap'\n", PreflightError),
        ("srun: error: Unable to create step for job 13: Invalid generic resource (gres) specification\n", PreflightError),
        ("srun: error: Unable to confirm allocation for job 13: Access/permission denied\n", PreflightError),
        ("srun: error: Unable to create step for job 13: Requested node configuration is not available\n", Unreachable),
        ("sh: 1: exec: srun: not found\n", PreflightError),
        ("slurmstepd: error: execve(): /x/python3: No such file or directory\n", PreflightError),
        ("distmagic: no keeper answers on a1: Connection refused\n", Unreachable),
        ("srun: error: Something new\n", Unreachable),
    ],
)  # fmt: skip
def test_steps_that_do_not_begin(said, kind, golden):
    error = srun_words.trouble("a1", "13", said)
    assert type(error) is kind
    golden(error)
    assert "ssh" not in error.hint


@pytest.mark.parametrize(
    "said",
    [
        "",
        "Traceback (most recent call last)\n",
        "srun: error: a1: task 0: Exited with exit code 3\n",
    ],
)
def test_an_end_of_the_process_itself_is_no_trouble(said):
    assert srun_words.trouble("a1", "13", said) is None


def test_words_of_srun_are_not_the_process_own():
    said = "mine\nsrun: error: a1: task 0: Exited with exit code 3\nsrun: Terminating StepId=7.1\nand mine"
    assert srun_words.own_words(said) == "mine\nand mine"
