"""The variables TOY_NODE, TOY_NODES and TOY_LEAD of a node."""

from distmagic.inside.job_node import JobNode, Variables, anonymous


def place(environ):
    found = Variables("Toy", environ)
    if not found.has_any("TOY_NODE"):
        return None
    found.require("TOY_NODE", "TOY_NODES", "TOY_LEAD")
    return JobNode(
        system="Toy job 1",
        key="toy 1",
        node_rank=found.below("TOY_NODE", "TOY_NODES"),
        lead=found.get("TOY_LEAD"),
        names=anonymous(found.get("TOY_LEAD"), found.number("TOY_NODES")),
    )
