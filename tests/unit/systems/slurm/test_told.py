"""What a user is told when Slurm says no, does not answer or takes nodes back: every word of it is in a golden file."""

from __future__ import annotations

import pytest

from distmagic.errors import DistmagicError, UsageError
from distmagic.request.allocation import SlurmRequest
from distmagic.systems.slurm import srun_words
from distmagic.systems.slurm.allocation import ONE_CORE
from distmagic.systems.slurm.job_states import (
    JobState,
    cure_of_endless,
    ended,
    waiting,
)
from distmagic.systems.slurm.refusals import refusal
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
    state = JobState(job="17", state="PENDING", reason=reason)
    return waiting(state), cure_of_endless(state)


def of_end(state: str, said: str = "", *, was_held: bool = True) -> DistmagicError:
    return ended("17", JobState(job="17", state=state), said, was_held=was_held)


def gpus_of_a_job() -> DistmagicError:
    with pytest.raises(UsageError) as caught:
        SlurmRequest(options=(("gpus", "8"),))
    return caught.value


TOLD = {
    "a wrong partition": of_request("Invalid partition name specified"),
    "a wrong account": of_request(
        "Invalid account or account/partition combination specified"
    ),
    "an account that may not use the partition": of_pending("AccountNotAllowed"),
    "a wrong constraint": of_request("Invalid feature specification"),
    "a wrong reservation": of_request("Requested reservation is invalid"),
    "a wrong quality of service": of_request("Invalid qos specification"),
    "more nodes than there are": of_pending("PartitionNodeLimit"),
    "more nodes than there are, refused": of_request(
        "Node count specification invalid"
    ),
    "more GPUs than a node has": of_request(
        "Invalid generic resource (gres) specification"
    ),
    "more memory than a node has": of_request("Memory specification can not be satisfied"),
    "more time than the partition allows": of_pending("PartitionTimeLimit"),
    "an option that sbatch does not know": refusal(
        "login1", "sbatch", "sbatch: unrecognized option '--frobnicate=1'\n"
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
