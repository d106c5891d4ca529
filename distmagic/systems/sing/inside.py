"""SING Cloud's words: SING_RANK and SING_WORLD_SIZE count nodes; node i is JOB-i.SUFFIX, a name that may resolve late. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from distmagic.inside.job_node import JobNode, Variables

_NEEDED = ("SING_RANK", "SING_WORLD_SIZE", "SING_JOB_NAME", "SING_HOSTNAME_SUFFIX")
_ADDRESSES = ("SING_MASTER_ADDR", "SING_HOST_ADDR")


def place(environ: Mapping[str, str]) -> JobNode | None:
    """Return the place of this process in a job, None outside one. Raises `UsageError`."""
    found = Variables("SING Cloud", environ)
    if not found.has_any(*_NEEDED, *_ADDRESSES):
        return None
    found.require(*_NEEDED)
    node_rank = found.below("SING_RANK", "SING_WORLD_SIZE")
    job, suffix = found.get("SING_JOB_NAME"), found.get("SING_HOSTNAME_SUFFIX")
    names = [
        f"{job}-{number}.{suffix}" for number in range(found.number("SING_WORLD_SIZE"))
    ]
    master, own = found.get("SING_MASTER_ADDR"), found.get("SING_HOST_ADDR")
    if node_rank and master and own == master:
        raise found.error(
            f"SING_RANK is {node_rank}, and SING_HOST_ADDR is that of node 0, SING_MASTER_ADDR."
        )
    for name, node in zip(_ADDRESSES, (0, node_rank), strict=True):
        address = found.get(name)
        if address in names and names[node] != address:
            raise found.error(
                f"{name} is {address}, and node {node} of this job is {names[node]}."
            )
    return JobNode(
        system=f"SING Cloud job {job}",
        key=f"sing {job} {suffix}",
        node_rank=node_rank,
        lead=master or names[0],
        names=tuple(names),
    )
