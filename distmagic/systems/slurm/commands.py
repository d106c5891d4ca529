"""Slurm's commands on a log-in node: submit, look, cancel. Each has a time limit, and its errors become ours here."""

from __future__ import annotations

from contextlib import suppress

from distmagic.errors import DistmagicError, UsageError
from distmagic.request.allocation import SlurmRequest
from distmagic.systems.slurm import job_states, refusals, srun_words, submission
from distmagic.systems.slurm.job_states import JobState
from distmagic.systems.slurm.shell import Shell
from distmagic.transports.asking import Asker

_KILL_S = 5.0
_LOG_BYTES = "2000"  # of what a batch script printed that has failed


def submit(
    shell: Shell,
    request: SlurmRequest,
    asker: Asker,
    *,
    comment: str,
    python: str,
    lease_s: float,
    is_elastic: bool,
) -> tuple[str, str]:
    """Submit an allocation; return its number, and its cluster in a federation. Raises `UsageError` or `Unreachable`."""
    script = submission.script(request, python, lease_s, is_elastic=is_elastic)
    answer = shell.run(
        submission.arguments(request, comment, is_elastic=is_elastic), asker, script
    )
    if answer.code != 0:
        raise refusals.refusal(shell.name, "sbatch", answer.err)
    try:
        return submission.job_id(answer.out)
    except ValueError as error:
        raise UsageError(
            f"{shell.name}: {error}.", "Try sbatch --parsable by hand there."
        ) from None


def look(
    shell: Shell, jobs: tuple[str, ...], cluster: str, asker: Asker
) -> dict[str, JobState]:
    """Return what Slurm knows of these jobs, for none of all that are this user's.

    One of which it knows nothing any more is left out. Raises `Unreachable` where it can't be asked: that says nothing.
    """
    answer = shell.run(srun_words.clean(job_states.squeue(jobs, cluster)), asker)
    if answer.code != 0:
        if refusals.is_unknown_job(answer.err):
            return {}
        raise refusals.refusal(shell.name, "squeue", answer.err)
    return job_states.rows(answer.out)


def cancel(
    shell: Shell, job: str, cluster: str, asker: Asker, timeout_s: float
) -> None:
    """End a job, as far as that can be."""
    with suppress(DistmagicError):  # out of reach: its first lease ends it
        shell.run(
            srun_words.clean(("scancel", *srun_words.of_cluster(cluster), job)),
            asker,
            timeout_s=timeout_s,
        )


def kill_marked(shell: Shell, mark: str, asker: Asker) -> None:
    """End the sruns of an allocation that is over, as far as that can be: see srun_words.kill_marked."""
    # RuntimeError: a Python that ends starts no thread.
    with suppress(DistmagicError, RuntimeError):
        shell.run(srun_words.kill_marked(mark), asker, timeout_s=_KILL_S)


def printed(shell: Shell, job: str, asker: Asker) -> str:
    """Return what the batch script of a job printed that ended before its keeper was up, and remove it; "" without any.

    It lies in the home, which is not shared everywhere.
    """
    path = submission.LOG.replace("%j", job)
    script = 'test -f "$1" && tail -c "$2" "$1" && rm -f "$1"'
    try:
        return shell.run(("sh", "-c", script, "sh", path, _LOG_BYTES), asker).out
    except DistmagicError:
        return ""
