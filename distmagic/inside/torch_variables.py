"""Variables of torch set by another launcher, and torchrun's own PET_*. Pure."""

from __future__ import annotations

from distmagic.inside.job_node import Environ, JobNode, RankTask, Variables, anonymous

SAID_BY = "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE"


def by_variables(environ: Environ) -> JobNode | None:
    """Return the place given by another launcher's RANK and WORLD_SIZE, or by torchrun's PET_*;
    None without them.

    MASTER_ADDR alone does not count: notebooks set it for their own process group. Raises
    `UsageError`.
    """
    found = Variables("torchrun", environ)
    if found.has_any("RANK", "WORLD_SIZE"):
        return _of_ranks(found)
    if found.has_any("PET_NODE_RANK", "PET_MASTER_ADDR"):
        found.require("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")
        lead, run_id = found.get("PET_MASTER_ADDR"), found.get("PET_RDZV_ID")
        return JobNode(
            system="torchrun",
            key=f"torchrun {run_id} {lead} {found.get('PET_MASTER_PORT')}",
            node_rank=found.below("PET_NODE_RANK", "PET_NNODES"),
            lead=lead,
            names=anonymous(lead, found.number("PET_NNODES")),
        )
    return None


def _of_ranks(found: Variables) -> JobNode:
    """Return the place of a rank, or, without LOCAL_WORLD_SIZE and LOCAL_RANK, of one process per
    node.
    """
    found.require("RANK", "WORLD_SIZE", "MASTER_ADDR")
    lead = found.get("MASTER_ADDR")
    rank = found.below("RANK", "WORLD_SIZE")
    world_size = found.number("WORLD_SIZE")
    local_rank, local_world_size = 0, 1
    if found.has_any("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        found.require("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        local_rank = found.below("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        local_world_size = found.number("LOCAL_WORLD_SIZE")
    if world_size % local_world_size or rank % local_world_size != local_rank:
        raise found.error(
            f"these numbers contradict each other: RANK is {rank} of WORLD_SIZE {world_size}, "
            f"and LOCAL_RANK {local_rank} of LOCAL_WORLD_SIZE {local_world_size}."
        )
    task = RankTask(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        said_by=SAID_BY,
    )
    return JobNode(
        system="torchrun",
        key=f"torchrun {lead} {found.get('MASTER_PORT')}",
        node_rank=rank // local_world_size,
        lead=lead,
        names=anonymous(lead, world_size // local_world_size),
        task=None if local_world_size == 1 else task,
    )
