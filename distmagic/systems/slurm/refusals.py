"""What sbatch, squeue and scancel say when they fail, as errors of ours. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from distmagic.errors import DistmagicError, Unreachable, UsageError


@dataclass(frozen=True)
class _Refusal:
    pattern: str
    message: str
    hint: str


_REFUSALS = (
    _Refusal(
        r"invalid partition|partition specified|not valid in this partition",
        "Slurm has no such partition, or you may not use it",
        "sinfo lists the partitions: --partition NAME.",
    ),
    _Refusal(
        r"account/partition combination|Invalid account|account .*(?:not|invalid)",
        "Slurm doesn't take this account",
        "sacctmgr show associations user=$USER lists yours: --account NAME.",
    ),
    _Refusal(
        r"Invalid qos|qos",
        "Slurm doesn't take this quality of service",
        "Name another with --qos, or none.",
    ),
    _Refusal(
        r"Invalid feature|feature specification",
        "no node has the feature of --constraint",
        "sinfo -o '%N %f' lists the features of all nodes.",
    ),
    _Refusal(
        r"reservation",
        "Slurm has no such reservation, or you may not use it",
        "scontrol show reservation lists them.",
    ),
    _Refusal(
        r"generic resource|gres|gpus",
        "the nodes don't have the GPUs that are asked for",
        "sinfo -o '%N %G' shows what each node has: --gpus-per-node N.",
    ),
    _Refusal(
        r"Memory specification",
        "no node has as much memory as --mem asks for",
        "sinfo -o '%N %m' shows the memory of each node, in MiB.",
    ),
    _Refusal(
        r"node count|more processors|node configuration is not available|Too many nodes",
        "no nodes of this partition are as the job asks for",
        "Ask for less, or for another partition: sinfo -o '%P %D %c %m %G'.",
    ),
    _Refusal(
        r"time limit|Invalid.*time",
        "Slurm doesn't take the time of --time",
        "sinfo -o '%P %l' shows the longest time of each partition.",
    ),
    _Refusal(
        r"unrecogni[sz]ed option|invalid option|ambiguous",
        "this sbatch has no such option",
        "sbatch --help lists its options; --slurm NAME=VALUE passes any of them.",
    ),
    _Refusal(
        r"[Ll]imit",
        "a limit of your account is reached",
        "squeue --me lists what you have there.",
    ),
)
_AWAY = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Zero Bytes|Connection timed out"
    r"|resolve|connect failure|Slurm is initializing|munge",
    re.IGNORECASE,
)
_MISSING = r"\b{program}: (?:command )?(?:not found|No such file or directory)\s*$"


def refusal(login: str, program: str, said: str) -> DistmagicError:
    """Return the error of a command that failed on `login`, from its stderr.

    A controller that is away says nothing of the jobs: they may well run.
    """
    lines = []
    for line in said.splitlines():
        own = line.partition("error: ")[2] or line.removeprefix(f"{program}: ")
        if own.strip() and own.strip() not in lines:
            lines.append(own.strip())
    words = " ".join(lines)[:500]
    if re.search(_MISSING.format(program=program), said, re.MULTILINE):
        return Unreachable(
            login,
            f"there is no program {program}.",
            "Name a node with Slurm's commands: --on slurm:LOGIN.",
        )
    if _AWAY.search(said):
        return Unreachable(
            login,
            f"Slurm's controller does not answer ({words}).",
            "Running jobs continue. Try again; scontrol ping shows if it is back.",
        )
    for one in _REFUSALS:
        if re.search(one.pattern, said, re.IGNORECASE):
            return UsageError(f"{one.message} ({program}: {words}).", one.hint)
    return UsageError(
        f"Slurm refused it ({program}: {words or 'without a word'}).",
        "Correct what it names, and run the cell again.",
    )


def is_unknown_job(said: str) -> bool:
    """Whether squeue no longer knows a job: it has ended some minutes ago."""
    return "Invalid job id" in said
