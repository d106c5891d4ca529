"""torchrun's words: what it sets for the processes that it starts, what others set in its place, and its PET_*. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from distmagic.inside.job_node import JobNode, RankTask, Variables, anonymous

_STARTED = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "TORCHELASTIC_RUN_ID",
)  # fmt: skip

_SAID_BY = "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE"


def started(environ: Mapping[str, str]) -> JobNode | None:
    """Return the place of a process that torchrun has started, None for any other. Raises `SpecError`."""
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
        said_by=_SAID_BY,
    )
    node_rank = found.below("GROUP_RANK", "GROUP_WORLD_SIZE")
    nnodes = found.number("GROUP_WORLD_SIZE")
    if nnodes > task.world_size:
        raise found.error(
            f"GROUP_WORLD_SIZE is {nnodes}, and WORLD_SIZE is {task.world_size}."
        )
    return JobNode(
        system=f"torchrun job {run_id}",
        key=f"torchrun {run_id} {lead} {found.get('MASTER_PORT')}",
        node_rank=node_rank,
        lead=lead,
        names=anonymous(lead, nnodes),
        task=None if task.world_size == nnodes else task,
    )


def by_variables(environ: Mapping[str, str]) -> JobNode | None:
    """Return the place that somebody else's RANK and WORLD_SIZE, or torchrun's own PET_*, give; None without them.

    MASTER_ADDR alone says nothing: notebooks set it for a process group of their own. Raises `SpecError`.
    """
    found = Variables("torchrun", environ)
    if found.has_any("RANK", "WORLD_SIZE"):
        return _of_ranks(found)
    if found.has_any("PET_NODE_RANK", "PET_MASTER_ADDR"):
        return _of_flags(found)
    return None


def _of_ranks(found: Variables) -> JobNode:
    """Without LOCAL_WORLD_SIZE and LOCAL_RANK there is a process a node: so do operators of Kubernetes, for torchrun."""
    found.require("RANK", "WORLD_SIZE", "MASTER_ADDR")
    lead = found.get("MASTER_ADDR")
    key = f"torchrun {lead} {found.get('MASTER_PORT')}"
    rank = found.below("RANK", "WORLD_SIZE")
    world_size = found.number("WORLD_SIZE")
    if not found.has_any("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        return JobNode(
            system="torchrun",
            key=key,
            node_rank=rank,
            lead=lead,
            names=anonymous(lead, world_size),
        )
    found.require("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    local_rank = found.below("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    local_world_size = found.number("LOCAL_WORLD_SIZE")
    if world_size % local_world_size or rank % local_world_size != local_rank:
        raise found.error(
            f"RANK is {rank} of WORLD_SIZE {world_size}, "
            f"and LOCAL_RANK {local_rank} of LOCAL_WORLD_SIZE {local_world_size}."
        )
    task = RankTask(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        said_by=_SAID_BY,
    )
    return JobNode(
        system="torchrun",
        key=key,
        node_rank=rank // local_world_size,
        lead=lead,
        names=anonymous(lead, world_size // local_world_size),
        task=None if local_world_size == 1 else task,
    )


def _of_flags(found: Variables) -> JobNode:
    found.require("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")
    lead, run_id = found.get("PET_MASTER_ADDR"), found.get("PET_RDZV_ID")
    return JobNode(
        system="torchrun",
        key=f"torchrun {run_id} {lead} {found.get('PET_MASTER_PORT')}",
        node_rank=found.below("PET_NODE_RANK", "PET_NNODES"),
        lead=lead,
        names=anonymous(lead, found.number("PET_NNODES")),
    )
