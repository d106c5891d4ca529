"""Reads SkyPilot's variables on a task's node (0.14: SKYPILOT_NODE_IPS has one address per line,
head first). Pure.
"""

from __future__ import annotations

from distmagic.inside.job_node import Environ, JobNode, Variables

_NEEDED = ("SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK")


def place(environ: Environ) -> JobNode | None:
    """Return the place of this process in a task, None outside of one. Raises `UsageError`."""
    found = Variables("SkyPilot", environ)
    if not found.has_any(*_NEEDED):
        return None
    found.require(*_NEEDED)
    addresses = tuple(found.get("SKYPILOT_NODE_IPS").split())
    count = found.number("SKYPILOT_NUM_NODES", least=1)
    if len(addresses) != count:
        raise found.error(
            f"SKYPILOT_NUM_NODES is {count}, and the number of addresses in SKYPILOT_NODE_IPS is {len(addresses)}."
        )
    task = found.get("SKYPILOT_TASK_ID")
    return JobNode(
        system=f"SkyPilot task {task}" if task else "SkyPilot",
        key=f"skypilot {task} {' '.join(addresses)}",
        node_rank=found.below("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
        lead=addresses[0],
        names=addresses,
    )
