"""Reads SING Cloud's variables. Pure.

SING_RANK and SING_WORLD_SIZE count nodes; node i is JOB-i.SUFFIX, a name that may resolve late.
"""

from __future__ import annotations

from distmagic.inside.job_node import Environ, JobNode, Variables

_NEEDED = ("SING_RANK", "SING_WORLD_SIZE", "SING_JOB_NAME", "SING_HOSTNAME_SUFFIX")


def place(environ: Environ) -> JobNode | None:
    """Return the place of this process in a job, None outside of one. Raises `UsageError`."""
    found = Variables("SING Cloud", environ)
    if not found.has_any(*_NEEDED, "SING_MASTER_ADDR", "SING_HOST_ADDR"):
        return None
    found.require(*_NEEDED)
    node_rank = found.below("SING_RANK", "SING_WORLD_SIZE")
    job, suffix = found.get("SING_JOB_NAME"), found.get("SING_HOSTNAME_SUFFIX")
    names = [
        f"{job}-{number}.{suffix}" for number in range(found.number("SING_WORLD_SIZE"))
    ]
    return JobNode(
        system=f"SING Cloud job {job}",
        key=f"sing {job} {suffix}",
        node_rank=node_rank,
        lead=found.get("SING_MASTER_ADDR") or names[0],
        names=tuple(names),
    )
