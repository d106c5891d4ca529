"""Slurm's commands on a log-in node: query and cancel jobs.

Each has a time limit, and raises distmagic's errors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

from distmagic.diagnosis.finding import Finding
from distmagic.errors import DistmagicError, Unreachable, UsageError
from distmagic.systems.slurm import (
    job_states,
    node_states,
    srun_words,
    submission,
)
from distmagic.systems.slurm.job_states import JobState
from distmagic.systems.slurm.shell import Shell
from distmagic.transports.asking import Asker

SOON_S = 5.0  # for a command while the kernel ends
_LOG_BYTES = "2000"  # limit for the output of a failed batch script
_AWAY = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Zero Bytes|Connection timed out"
    r"|resolve|connect failure|Slurm is initializing|munge",
    re.IGNORECASE,
)
_MISSING = r"\b{program}: (?:command )?(?:not found|No such file or directory)\s*$"


def look(shell: Shell, job: str, asker: Asker) -> dict[str, JobState]:
    """Return {job ID: state} for one job, or for all jobs of this user if `job` is "".

    A job that Slurm no longer lists is left out. Raises `Unreachable` if `squeue` fails.
    """
    answer = shell.run(job_states.squeue(job), asker)
    if "Invalid job id" in answer.err:  # it has ended some minutes ago
        return {}
    if answer.code != 0:
        raise refusal(shell.name, "squeue", answer.err)
    try:
        return job_states.rows(answer.out)
    except ValueError as error:
        raise Unreachable(shell.name, f"squeue: {error}.") from None


def node_findings(
    shell: Shell, nodes: Sequence[str], ask: str, asker: Asker
) -> tuple[Finding, ...]:
    """Return the nodes that Slurm takes out of use; () also if it does not answer soon.

    See `node_states.findings`.
    """
    with suppress(DistmagicError):
        answer = shell.run(node_states.sinfo(nodes), asker, timeout_s=SOON_S)
        return node_states.findings(answer.out, nodes, ask)
    return ()


def cancel(shell: Shell, job: str, asker: Asker) -> None:
    """Cancel a job, if possible."""
    # Unreachable, or Python is exiting and starts no threads: its first lease ends it.
    with suppress(DistmagicError, RuntimeError):
        shell.run(("scancel", job), asker, timeout_s=SOON_S)


def kill_sruns(shell: Shell, job: str, asker: Asker, mark: str = "") -> None:
    """End distmagic's srun processes in a job (srun_words.kill_sruns); a failure of the command is
    ignored.
    """
    with suppress(DistmagicError, RuntimeError):
        shell.run(srun_words.kill_sruns(job, mark), asker, timeout_s=SOON_S)


def printed(shell: Shell, job: str, asker: Asker) -> str:
    """Return the output of a job's batch script that ended before its keeper started, and remove
    it; "" without any.

    It is in the home directory, which not all hosts share.
    """
    path = submission.LOG.replace("%j", job)
    script = 'test -f "$1" && tail -c "$2" "$1" && rm -f "$1"'
    try:
        return shell.run(("sh", "-c", script, "sh", path, _LOG_BYTES), asker).out
    except DistmagicError:
        return ""


def refusal(login: str, program: str, said: str) -> DistmagicError:
    """Return the error of a command that failed on `login`, from its stderr.

    An unreachable controller means nothing for the jobs: they may well run.
    """
    lines = []
    for line in said.splitlines():
        own = line.partition("error: ")[2] or line.removeprefix(f"{program}: ")
        lines.append(own.strip())
    words = " ".join(dict.fromkeys(lines)).strip()[:500] or "without a word"
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
    return UsageError(
        f"Slurm refused the request ({program}: {words}).", job_states.ASK_OTHERWISE
    )
