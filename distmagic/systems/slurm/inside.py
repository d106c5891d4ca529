"""Reads Slurm's variables of a task in a step. Pure.

The nodes are those of the step, SLURM_STEP_*. The job's list (SLURM_JOB_NODELIST) is not used: in a
step with one node it may have only that node, or all nodes.
"""

from __future__ import annotations

import re

from distmagic.errors import UsageError
from distmagic.inside.job_node import Environ, JobNode, RankTask, Variables
from distmagic.systems.slurm import nodelist

_OF_STEP = (
    "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID",
)  # fmt: skip
_COUNT = re.compile(r"(?P<tasks>[0-9]{1,5})(?:\(x(?P<nodes>[0-9]{1,5})\))?")


def place(environ: Environ) -> JobNode | None:
    """Return the place of this process in a step of a job; None outside a job, and in a job with a
    single node.

    Raises `UsageError`, also for a batch script or a shell of salloc, which run on only one of
    several nodes.
    """
    found = Variables("Slurm", environ)
    if not found.has_any("SLURM_JOB_ID", *_OF_STEP):
        return None
    job = found.get("SLURM_JOB_ID")
    if job and not found.has_any("SLURM_STEP_ID"):
        _check_alone(found, job)
        return None
    found.require("SLURM_JOB_ID", "SLURM_STEP_ID", *_OF_STEP)
    try:
        names = nodelist.expand(found.get("SLURM_STEP_NODELIST"))
    except ValueError as error:
        raise found.error(f"SLURM_STEP_NODELIST can't be read: {error}.") from None
    node_rank = found.below("SLURM_NODEID", "SLURM_STEP_NUM_NODES")
    rank = found.below("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    tasks, counts = _tasks(found), (len(names), found.number("SLURM_STEP_NUM_TASKS"))
    if (len(tasks), sum(tasks)) != counts or node_rank >= len(names):
        raise found.error(
            "SLURM_STEP_NODELIST, SLURM_STEP_NUM_NODES, SLURM_STEP_NUM_TASKS and "
            "SLURM_STEP_TASKS_PER_NODE contradict each other."
        )
    task = None
    if sum(tasks) > len(names):
        task = RankTask(
            rank=rank,
            world_size=sum(tasks),
            local_rank=found.number("SLURM_LOCALID"),
            local_world_size=tasks[node_rank],
            said_by="SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE",
        )
    return JobNode(
        system=f"Slurm job {job}",
        key=f"slurm {job}.{found.get('SLURM_STEP_ID')}",
        node_rank=node_rank,
        lead=names[0],
        names=names,
        task=task,
    )


def _check_alone(found: Variables, job: str) -> None:
    """Raise `UsageError` in a batch script, or a shell of salloc, of a job with several nodes.

    Such a process has only one of them.
    """
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if found.get(name) and found.number(name) > 1:
            break
    else:
        return
    where = "the batch step" if found.get("SLURM_PROCID") else "no step"
    raise UsageError(
        f"Inside Slurm job {job}: this process is in {where} of the job (SLURM_STEP_ID is not set), so it has one of {found.get(name)} nodes ({name}).",
        "Write srun before the command, with --ntasks-per-node=1; or --on slurm, which uses all nodes of the job; "
        "or --on none, which uses this node alone.",
    )


def _tasks(found: Variables) -> list[int]:
    """Return the number of tasks of each node: "2(x3),1" is 2, 2, 2, 1."""
    text = found.get("SLURM_STEP_TASKS_PER_NODE")
    tasks = []
    for part in text.split(","):
        one = _COUNT.fullmatch(part)
        if one is None:
            raise found.error(f"SLURM_STEP_TASKS_PER_NODE is {text[:200]!r}.")
        tasks += [int(one["tasks"])] * int(one["nodes"] or 1)
    return tasks
