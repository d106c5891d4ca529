"""Arguments of `srun`, and its error messages. Pure.

Slurm's commands take options from variables: SLURM_CPUS_PER_TASK of a surrounding job would change
distmagic's step. So `clean` starts every Slurm command without these variables, except those that
select the cluster, and those with the user's account and partition.
"""

from __future__ import annotations

import re

from distmagic.errors import (
    AllocationEnded,
    DistmagicError,
    HostError,
    PreflightError,
    Unreachable,
)
from distmagic.request.hosts import Source, parse_host
from distmagic.transports import Argv

KEPT_VARIABLES = (
    "SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION",
    "SBATCH_CONSTRAINT",
)  # fmt: skip
_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SALLOC_",
    "SRUN_",
    "SINFO_",
    "SQUEUE_",
    "SCANCEL_",
    "PMI",
    "PMIX_",
)
_CLEAN = (
    "for name in $(env | sed -n 's/^\\([A-Z][A-Z0-9_]*\\)=.*/\\1/p'); do "
    f"case $name in {'|'.join(KEPT_VARIABLES)}) ;; "
    f'{"|".join(f"{prefix}*" for prefix in _PREFIXES)}) unset "$name";; esac; done; exec "$@"'
)

# overlap: next to the keeper's step, which has all resources. unbuffered: incomplete lines arrive
# at once. gres=none: the keeper has the GPUs, and a job with --gpus would refuse any other step.
# propagate=NONE, chdir: limits and directory of the log-in node are meaningless on this one.
STEP_OPTIONS = (
    "--overlap", "--unbuffered", "--nodes=1", "--ntasks=1", "--gres=none", "--mpi=none", "--cpu-bind=none",
    "--kill-on-bad-exit=0", "--propagate=NONE", "--chdir=/", "--quiet",
)  # fmt: skip


def on_login(login: str) -> str:
    """Return the start of a command on a log-in node, with a blank; "" for this machine."""
    return f"{parse_host(login).by_hand()} " if login else ""


def source(login: str, job: str) -> Source:
    """Return the source of a job's nodes. `login` is "" for a job of this machine."""
    return Source(
        name=f"{login or 'here'}:slurm:{job}",
        by_hand=f"{on_login(login)}srun --jobid={job} --overlap -N1 -n1 -w {{node}}",
        ended=f"Slurm job {job} has ended.",
        cure="Run the cell again: it asks for new nodes.",
        needs_answers=True,
    )


def clean(argv: Argv) -> Argv:
    """Return the command that runs `argv` without the variables of a surrounding job."""
    return ("sh", "-c", _CLEAN, "sh", *argv)


def step(job: str, node: str, argv: Argv) -> Argv:
    """Return the command that runs `argv` as a separate step on one node of a job, with its own
    pipes.
    """
    where = (f"--jobid={job}", f"--nodelist={node}")
    return clean(("srun", *where, *STEP_OPTIONS, *argv))


def kill_sruns(job: str, mark: str = "") -> Argv:
    """Return the command that ends srun processes of distmagic in a job: those with this mark, or
    those of all notebooks.

    An srun process to a dead node would otherwise wait forever.
    """
    script = 'pkill -KILL -u "$(id -u)" -f "^srun --jobid=$1 .* distmagic-usher .*$2"'
    return ("sh", "-c", script, "sh", job, mark)


_TASK_ENDED = re.compile(
    r"^(?:srun: (?:error|Terminating|launch/slurm|Force|Job step|Complete|.*\bexited\b)|slurmstepd: error: \*\*\*)"
)


def own_words(said: str) -> str:
    """Return a process's stderr without srun's own lines about its end."""
    kept = [
        line for line in said.splitlines(keepends=True) if not _TASK_ENDED.match(line)
    ]
    return "".join(kept)


_AGAIN = "It is tried again; squeue -j {job} shows the state of the job."
# Reasons why there is no step: what stderr has, and the error with its hint, for a job and a node.
_CAUSES: tuple[tuple[str, type[DistmagicError], str, str], ...] = (
    (
        r"distmagic: no keeper answers",
        Unreachable,
        "its keeper does not answer; it starts the ranks' processes, and ends with the job.",
        _AGAIN,
    ),
    (
        r"job \d+ has expired|Invalid job id|Job/step already complet|job.*(?:already finished|completing)",
        AllocationEnded,
        "Slurm job {job} has ended, and {node} is no longer ours.",
        "Run the cell again: it asks for new nodes.",
    ),
    (
        r"unrecogni[sz]ed option '?--overlap",
        PreflightError,
        "this Slurm has no srun --overlap (it came with 20.11), so no step can be started next to another.",
        "Reach the nodes with --hosts, if the cluster lets you log in to them, or ask for a newer Slurm.",
    ),
    (
        (
            r"Memory required by task is not available|Requested nodes are busy"
            r"|step creation (?:temporarily )?disabled|Job step creation temporarily"
        ),
        Unreachable,
        "Slurm starts no step on this node for now; after a restart of its controller that lasts up to half a minute.",
        "Run the cell again then.",
    ),
    (
        (
            r"Unable to contact slurm controller|Socket timed out|Connection refused|Zero Bytes were transmitted"
            r"|slurm_receive_msg|Connection timed out|Communication connection failure"
        ),
        Unreachable,
        "Slurm's controller or the node's slurmd does not answer.",
        _AGAIN,
    ),
    (
        r"Invalid generic resource|Insufficient GRES",
        PreflightError,
        "the job asked for a total of GPUs (--gpus), and Slurm gives none of them to the run's processes.",
        "Ask for GPUs of each node: --gpus-per-node N.",
    ),
    (
        r"Access/permission denied|User not authorized|Invalid user",
        PreflightError,
        "Slurm lets this user start nothing in job {job}.",
        "Name a job of your own: squeue --me lists them.",
    ),
    (
        r"Requested node configuration is not available|Invalid node name|not in (?:the )?(?:job|allocation)",
        Unreachable,
        "it is not, or no longer, a node of Slurm job {job}: Slurm takes dead nodes from jobs that can do without them.",
        "squeue -j {job} -o %N shows the job's nodes.",
    ),
    (
        # Or the words of the shell that starts a Python of the home directory
        # (transports/program_text.py).
        r"(?m)execve\(\): .*No such file|^(.+): (?:line )?1: (?:exec: )?/.*/\1: (?:not found|No such file)",
        PreflightError,
        "there is no such Python on the node.",
        "Name one that the nodes have: --python /path/to/python3",
    ),
    (
        r"srun: (?:not found|command not found|No such file)",
        PreflightError,
        "there is no program srun on the log-in node.",
        "Name a node on which Slurm's commands work: --on slurm:LOGIN.",
    ),
)


def trouble(node: str, job: str, said: str) -> DistmagicError | None:
    """Return why a step on `node` of `job` did not start, from its stderr; None if stderr has no
    such reason.
    """
    for pattern, kind, message, hint in _CAUSES:
        if re.search(pattern, said, re.IGNORECASE):
            words = message.format(job=job, node=node), hint.format(job=job)
            return kind(node, *words) if issubclass(kind, HostError) else kind(*words)
    errors = re.findall(r"(?m)^srun: error: (?!.*(?:task \d|Exited with))(.+)$", said)
    if errors:
        return Unreachable(
            node,
            f"srun could not start anything on this node: {errors[-1].removesuffix('.')}.",
            _AGAIN.format(job=job),
        )
    return None
