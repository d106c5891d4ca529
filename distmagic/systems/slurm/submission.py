"""The arguments of sbatch for an allocation, and the script on its stdin. Pure.

Every value of the user is an argument of sbatch, and quoted like all arguments
(transports/quoting.py): the script has no directives. In the script only `setup` comes from the
user, and it is meant to be shell code.
"""

from __future__ import annotations

import re
import shlex

from distmagic.remote.frozen import frozen
from distmagic.request.allocation import SlurmRequest
from distmagic.transports import Argv, program_text

JOB_NAME = "distmagic"
LOG = ".distmagic-slurm-%j.out"  # in sbatch's directory; the keeper removes it once it has started
# Time for a notebook that checks a pending job every 30 s to notice that it runs.
FIRST_LEASE_S = 120.0
_KEEPERS = (
    "--overlap",
    "--ntasks-per-node=1",
    "--mpi=none",
    "--cpu-bind=none",
    "--quiet",
)
_LEAD = (*_KEEPERS, "--nodes=1", "--ntasks=1", "--propagate=NONE")
_OTHERS = ("srun", *_KEEPERS, "--relative=1", "--wait=0")
# If one keeper is killed, the others end too, and so the allocation; a job that may lose nodes
# continues with the rest.
_TOGETHER, _ELASTIC = ("--kill-on-bad-exit=1",), ("--kill-on-bad-exit=0", "--no-kill")


@frozen
class KeeperTerms:
    """Settings of an allocation: the interpreter of keepers and ushers, its lease, whether it may
    lose nodes.
    """

    python: str
    lease_s: float
    is_elastic: bool = False


def arguments(request: SlurmRequest, comment: str, *, is_elastic: bool) -> Argv:
    """Return the command of a submission; `comment` identifies its owner.

    no-requeue: a restarted job would have no notebook. no-kill: an elastic job continues when Slurm
    loses one of its nodes.
    """
    given = [
        f"--{name}={value}" if value else f"--{name}" for name, value in request.options
    ]
    own = [
        "--parsable", "--no-requeue", f"--job-name={JOB_NAME}", f"--comment={comment}", f"--output={LOG}",
        f"--nodes={request.nodes}",
    ]  # fmt: skip
    if is_elastic:
        own.append("--no-kill")
    return ("sbatch", *own, *given)


def preview(request: SlurmRequest, terms: KeeperTerms) -> str:
    """Return a readable form of the submission."""
    command = arguments(request, comment_of(""), is_elastic=terms.is_elastic)
    return f"{shlex.join(command)} <<'END'\n{script(request, terms)}END"


def script(request: SlurmRequest, terms: KeeperTerms) -> str:
    """Return the batch script: it runs the user's set-up, and then starts the keeper of the first
    node.

    It does that by exec, because Slurm's signals reach only the first process of a batch script.
    """
    lines = ["#!/bin/bash" if request.setup else "#!/bin/sh"]
    if request.setup:
        lines.append(request.setup)
    lines.append(f"exec {shlex.join(_lead(request.nodes, terms, request.idle_s))}")
    return "\n".join(lines) + "\n"


def lead_step(job: str, node: str) -> Argv:
    """Return the start of the command for the lead's step, on this node."""
    return ("srun", f"--jobid={job}", f"--nodelist={node}", *_LEAD)


def keepers_step(step: Argv, nodes: int, terms: KeeperTerms, idle_s: float) -> Argv:
    """Return the command that starts the keepers of an existing job; it continues after its caller
    has ended.
    """
    script = 'setsid "$@" </dev/null >/dev/null 2>&1 &'
    return ("sh", "-c", script, "sh", *step, *_lead(nodes, terms, idle_s))


def _lead(nodes: int, terms: KeeperTerms, idle_s: float) -> Argv:
    """Return the command that starts the keeper of the first node (the lead), which starts those of
    the other nodes.
    """
    others = nodes - 1
    step = []
    if others:
        losses = _ELASTIC if terms.is_elastic else _TOGETHER
        step = [*_OTHERS, *losses, f"--nodes={others}", f"--ntasks={others}"]
    settings = {
        "leads": True,
        "first_lease_s": FIRST_LEASE_S,
        "lease_s": terms.lease_s,
        "idle_s": idle_s,
        "step": step,
        "needs_others": not terms.is_elastic,
    }
    return program_text.command(terms.python, "keeper", settings)


def job_id(answer: str) -> str:
    """Return the job ID in output of `sbatch --parsable`: `17`, or `17;east` in a federation.

    Raises ValueError.
    """
    last = answer.strip().rpartition("\n")[2]
    found = re.fullmatch(r"(\d+)(?:;[A-Za-z0-9._-]+)?", last)
    if found is None:
        raise ValueError(f"sbatch printed {answer[:200]!r} instead of a job's number")
    return found[1]


def comment_of(owner: str) -> str:
    """Return the comment that names the notebook of an allocation, safe inside a row of squeue."""
    return f"{JOB_NAME}:{re.sub(r'[^A-Za-z0-9._:/@-]', '_', owner)[:200]}"
