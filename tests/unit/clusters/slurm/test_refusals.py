"""What Slurm's commands say when they fail, word for word as they were seen or stand in its source."""

from __future__ import annotations

import pytest

from distmagic.clusters.slurm.refusals import is_unknown_job, refusal
from distmagic.errors import AllocationEnded, PreflightError, SpecError, Unreachable
from distmagic.transports import srun_words

BATCH = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("said", "message", "hint"),
    [
        ("sbatch: error: invalid partition specified: nope\n" + BATCH + "Invalid partition name specified", "no such partition", "--partition"),
        (BATCH + "Invalid account or account/partition combination specified", "doesn't take this account", "--account"),
        (BATCH + "Invalid qos specification", "quality of service", "--qos"),
        (BATCH + "Invalid feature specification", "--constraint", "sinfo"),
        (BATCH + "Requested reservation is invalid", "no such reservation", "scontrol"),
        (BATCH + "Invalid generic resource (gres) specification", "don't have the GPUs", "--gpus-per-node"),
        (BATCH + "Memory specification can not be satisfied", "--mem", "sinfo"),
        (BATCH + "Requested node configuration is not available", "no nodes of this partition", "Ask for less"),
        (BATCH + "Node count specification invalid", "no nodes of this partition", "Ask for less"),
        (BATCH + "Requested time limit is invalid (missing or exceeds some limit)", "--time", "longest time"),
        ("sbatch: unrecognized option '--frobnicate=1'\nTry \"sbatch --help\"", "doesn't know an option", "sbatch --help"),
        (BATCH + "Something new", "Slurm refused it (sbatch: Batch job submission failed: Something new).", "Correct"),
    ],
)  # fmt: skip
def test_refusals(said, message, hint):
    error = refusal("login1", "sbatch", said)
    assert isinstance(error, SpecError)
    assert message in error.message
    assert hint in error.hint


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
    assert "Jobs that run go on" in error.hint


def test_a_machine_without_slurm():
    error = refusal("this machine", "sbatch", "sh: 1: exec: sbatch: not found\n")
    assert isinstance(error, Unreachable)
    assert error.message == "this machine: there is no program sbatch."
    assert "--on slurm:LOGIN" in error.hint


def test_a_value_that_is_taken_for_a_file_is_no_missing_program():
    said = "sbatch: error: slurm_open: /a/b: No such file or directory\nsbatch: error: Invalid node list\n"
    assert isinstance(refusal("login1", "sbatch", said), SpecError)


def test_a_job_that_is_no_longer_known():
    assert is_unknown_job("slurm_load_jobs error: Invalid job id specified")
    assert not is_unknown_job(
        "slurm_load_jobs error: Unable to contact slurm controller"
    )


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        ("srun: error: Slurm job 13 has expired\n", AllocationEnded, "Slurm job 13 has ended"),
        ("srun: error: Unable to confirm allocation for job 13: Invalid job id specified\n", AllocationEnded, "has ended"),
        ("srun: error: Unable to create step for job 13: Job/step already completing or completed\n", AllocationEnded, "has ended"),
        ("srun: error: Unable to create step for job 13: Memory required by task is not available\n", Unreachable, "for now"),
        ("srun: error: Unable to create step for job 13: Unable to contact slurm controller (connect failure)\n", Unreachable, "does not answer"),
        ("srun: unrecognized option '--overlap'\n", PreflightError, "20.11"),
        ("srun: error: Unable to create step for job 13: Invalid generic resource (gres) specification\n", PreflightError, "--gpus"),
        ("srun: error: Unable to confirm allocation for job 13: Access/permission denied\n", PreflightError, "lets this user"),
        ("srun: error: Unable to create step for job 13: Requested node configuration is not available\n", Unreachable, "no node of"),
        ("sh: 1: exec: srun: not found\n", PreflightError, "no program srun"),
        ("slurmstepd: error: execve(): /x/python3: No such file or directory\n", PreflightError, "no such Python"),
        ("distmagic: no keeper answers on a1: Connection refused\n", Unreachable, "keeper does not answer"),
        ("srun: error: Something new\n", Unreachable, "srun could not start anything there: Something new."),
    ],
)  # fmt: skip
def test_steps_that_do_not_begin(said, kind, message):
    error = srun_words.trouble("a1", "13", said)
    assert type(error) is kind
    assert message in error.message
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
