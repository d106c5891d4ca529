"""What a user is told when Slurm says no, does not answer or takes nodes back: every word of it is in a golden file."""

from __future__ import annotations

import pytest

from distmagic.errors import (
    AllocationEnded,
    DistmagicError,
    PreflightError,
    Unreachable,
    UsageError,
)
from distmagic.request.allocation import SlurmRequest
from distmagic.systems.slurm import srun_words
from distmagic.systems.slurm.allocation import ONE_CORE
from distmagic.systems.slurm.job_states import JobState, ended, waiting
from distmagic.systems.slurm.shell import refusal
from tests import REPOSITORY

BATCH = "sbatch: error: Batch job submission failed: "
STEP = "srun: error: Unable to create step for job 17: "
GOLDEN = REPOSITORY / "tests/golden/slurm_errors.txt"


def of_request(said: str) -> DistmagicError:
    return refusal("login1", "sbatch", f"{BATCH}{said}\n")


def of_step(said: str) -> DistmagicError:
    found = srun_words.trouble("gpu1", "17", said)
    assert found is not None
    return found


def of_pending(reason: str) -> tuple[str, str]:
    return waiting(JobState(job="17", state="PENDING", reason=reason)), ""


def of_end(state: str, said: str = "", *, was_held: bool = True) -> DistmagicError:
    return ended("17", JobState(job="17", state=state), said, was_held=was_held)


def gpus_of_a_job() -> DistmagicError:
    with pytest.raises(UsageError) as caught:
        SlurmRequest(options=(("gpus", "8"),))
    return caught.value


TOLD = {
    "a wrong partition": of_request("Invalid partition name specified"),
    "an account that may not use the partition": of_pending("AccountNotAllowed"),
    "an option that sbatch does not know": refusal(
        "login1", "sbatch", "sbatch: unrecognized option '--frobnicate=1'\nTry \"sbatch --help\""
    ),
    "a value that is taken for a file": refusal(
        "login1", "sbatch", "sbatch: error: slurm_open: /a/b: No such file or directory\nsbatch: error: Invalid node list\n"
    ),
    "--gpus, a job's total": gpus_of_a_job(),
    "--gpus in a job that is there": of_step(f"{STEP}Insufficient GRES available\n"),
    "one core a node": (ONE_CORE, ""),
    "no --overlap, before 20.11": of_step("srun: unrecognized option '--overlap'\n"),
    "the controller is away": refusal(
        "login1", "squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    ),
    "the controller is away, at a step": of_step(
        f"{STEP}Unable to contact slurm controller (connect failure)\n"
    ),
    "step creation is refused for a while": of_step(
        f"{STEP}Memory required by task is not available\n"
    ),
    "no keeper": of_step("distmagic: no keeper answers on gpu1: Connection refused\n"),
    "no such Python on a node": of_step(
        "slurmstepd: error: execve(): /x/python3: No such file or directory\n"
    ),
    "a machine without Slurm": refusal(
        "this machine", "sbatch", "sh: 1: exec: sbatch: not found\n"
    ),
    "it waits for nodes": of_pending("Resources"),
    "the time limit": of_end("TIMEOUT"),
    "a preemption": of_end("PREEMPTED"),
    "scancel by somebody else": of_end("CANCELLED"),
    "NODE_FAIL": of_end("NODE_FAIL"),
    "OUT_OF_MEMORY": of_end("OUT_OF_MEMORY"),
    "a keeper was killed": of_end("FAILED"),
    "the batch script fails": of_end("FAILED", "python3: not found\n", was_held=False),
    "nobody used it": of_end("COMPLETED"),
}  # fmt: skip


def test_every_word_that_is_told_of_slurm():
    lines = []
    for situation, told in TOLD.items():
        message, hint = told if isinstance(told, tuple) else (told.message, told.hint)
        lines += [f"{situation}:", f"    {message}"]
        lines += [f"    {line}" for line in hint.splitlines()]
    assert "\n".join(lines) + "\n" == GOLDEN.read_text()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("srun: error: Slurm job 13 has expired\n", AllocationEnded),
        ("srun: error: Unable to confirm allocation for job 13: Invalid job id specified\n", AllocationEnded),
        (f"{STEP}Job/step already completing or completed\n", AllocationEnded),
        (f"{STEP}Memory required by task is not available\n", Unreachable),
        (f"{STEP}Unable to contact slurm controller (connect failure)\n", Unreachable),
        ("srun: unrecognized option '--overlap'\n", PreflightError),
        (f"{STEP}Invalid generic resource (gres) specification\n", PreflightError),
        ("srun: error: Unable to confirm allocation for job 13: Access/permission denied\n", PreflightError),
        (f"{STEP}Requested node configuration is not available\n", Unreachable),
        ("sh: 1: exec: srun: not found\n", PreflightError),
        ("slurmstepd: error: execve(): /x/python3: No such file or directory\n", PreflightError),
        ("my env/python: 1: exec: /root/my env/python: not found\n", PreflightError),
        ("env/python: line 1: /root/env/python: No such file or directory\n", PreflightError),
        ("sh: 1: exec: /root/mine: not found\n", type(None)),
        ("distmagic: no keeper answers on a1: Connection refused\n", Unreachable),
        ("srun: error: Something new\n", Unreachable),
        ("Traceback (most recent call last)\n", type(None)),
        ("srun: error: a1: task 0: Exited with exit code 3\n", type(None)),
    ],
)  # fmt: skip
def test_steps_that_do_not_begin_and_an_end_of_the_process_itself(said, kind):
    assert type(srun_words.trouble("a1", "13", said)) is kind


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        f"{BATCH}Socket timed out on send/recv operation",
        f"{BATCH}Slurm is initializing, please retry",
    ],
)
def test_a_controller_that_is_away_says_nothing_of_jobs(said):
    assert isinstance(refusal("login1", "squeue", said), Unreachable)


def test_words_of_srun_are_not_the_process_own():
    said = "mine\nsrun: error: a1: task 0: Exited with exit code 3\nsrun: Terminating StepId=7.1\nand mine"
    assert srun_words.own_words(said) == "mine\nand mine"
