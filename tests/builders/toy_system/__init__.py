"""A system that somebody else brings: its nodes are processes of this machine. `SYSTEM` is what an entry point names."""

from distmagic.request.systems import System

SYSTEM = System(
    name="toy",
    title="Toy",
    folder=__name__,
    can=frozenset(("hosts", "inside", "export")),
    page="toys",
    on="toy",
    places="toy: a new shelf; toy:SHELF: one that is there",
)
