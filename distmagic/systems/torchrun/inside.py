"""Reads the variables that torchrun sets for its processes. Pure."""

from __future__ import annotations

from distmagic.inside.job_node import Environ, JobNode, RankTask, Variables, anonymous
from distmagic.inside.torch_variables import SAID_BY

_STARTED = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "TORCHELASTIC_RUN_ID",
)  # fmt: skip


def place(environ: Environ) -> JobNode | None:
    """Return the place of a process that torchrun has started, None for any other.

    Raises `UsageError`.
    """
    if not environ.get("TORCHELASTIC_RUN_ID"):
        return None
    found = Variables("torchrun", environ)
    found.require(*_STARTED)
    run_id, lead = found.get("TORCHELASTIC_RUN_ID"), found.get("MASTER_ADDR")
    task = RankTask(
        rank=found.below("RANK", "WORLD_SIZE"),
        world_size=found.number("WORLD_SIZE"),
        local_rank=found.below("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        local_world_size=found.number("LOCAL_WORLD_SIZE"),
        said_by=SAID_BY,
    )
    node_rank = found.below("GROUP_RANK", "GROUP_WORLD_SIZE")
    nnodes = found.number("GROUP_WORLD_SIZE")
    return JobNode(
        system=f"torchrun job {run_id}",
        key=f"torchrun {run_id} {lead} {found.get('MASTER_PORT')}",
        node_rank=node_rank,
        lead=lead,
        names=anonymous(lead, nnodes),
        task=None if task.world_size == nnodes else task,
    )
