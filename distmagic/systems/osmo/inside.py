"""Reads the variables of a task in NVIDIA OSMO.

OSMO sets none itself; exported workflows set these four in `environment`.

    DISTMAGIC_WORKFLOW     {{workflow_id}}
    DISTMAGIC_NODE_RANK    0 in the lead (master) task, 1, 2 ... in the workers
    DISTMAGIC_NNODES       the number of tasks in the group
    DISTMAGIC_MASTER_ADDR  {{host:TASK}} with the name of the lead task, which may resolve late

Pure.
"""

from __future__ import annotations

from distmagic.inside.job_node import Environ, JobNode, Variables, anonymous

VARIABLES = (
    "DISTMAGIC_WORKFLOW",
    "DISTMAGIC_NODE_RANK",
    "DISTMAGIC_NNODES",
    "DISTMAGIC_MASTER_ADDR",
)


def place(environ: Environ) -> JobNode | None:
    """Return the place of this process in a workflow, None outside of one. Raises `UsageError`."""
    found = Variables("OSMO", environ)
    if not found.has_any(*VARIABLES):
        return None
    found.require(*VARIABLES)
    workflow, lead = found.get("DISTMAGIC_WORKFLOW"), found.get("DISTMAGIC_MASTER_ADDR")
    node_rank = found.below("DISTMAGIC_NODE_RANK", "DISTMAGIC_NNODES")
    return JobNode(
        system=f"OSMO workflow {workflow}",
        key=f"osmo {workflow} {lead}",
        node_rank=node_rank,
        lead=lead,
        names=anonymous(lead, found.number("DISTMAGIC_NNODES")),
    )
