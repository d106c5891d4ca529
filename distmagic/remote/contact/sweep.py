"""Ends what killed agents have left."""

from __future__ import annotations

import shutil

from distmagic.remote.records import listing, places
from distmagic.remote.system import processes


def sweep_node(job: str, node_rank: int | None) -> tuple[str, ...]:
    """End what is left of a node of a job, and of dead agents of its other nodes; return what could
    not be ended.

    A live agent of another node runs on, even one that has just started and has recorded nothing.
    One host may be several nodes of a job, under several names.
    """
    own_dir = places.run_dir(job, node_rank) if node_rank is not None else None
    noted = {
        folder: processes.noted(folder / places.PID) for folder in places.run_dirs(job)
    }
    deserted = [
        folder
        for folder, agent in noted.items()
        if folder == own_dir or (agent is None and places.is_deserted(folder))
    ]
    spared = [agent for folder, agent in noted.items() if agent and folder != own_dir]
    # The agents of other nodes, including those without a directory or just being started. If the
    # node's own agent is unknown, an agent without any record is assumed to be it.
    own = listing.agent_of(job, node_rank) if node_rank is not None else None
    found = listing.agents_of(job)
    if node_rank is None or own is not None:
        found = tuple(filter(processes.is_agent, processes.marked(job)))
    spared += [agent for agent in found if own is None or agent.pid != own.pid]
    left = processes.sweep(job, spared=spared)
    for folder in deserted:
        shutil.rmtree(folder, ignore_errors=True)
    return tuple(map(str, left))


def sweep_dead() -> None:
    """End what is left of agents that were killed together with their notebook: no other contact
    came to do it.
    """
    for job, folders in places.dead_runs().items():
        if any(map(processes.is_agent, processes.marked(job))):
            continue  # the agent lives: a cleaner of /tmp has removed its socket
        processes.sweep(job, timeout_s=1.0)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    # Killed templates have left theirs.
    dead = filter(places.is_deserted, places.warm_dirs())
    for folder in (*dead, *places.forgotten()):
        shutil.rmtree(folder, ignore_errors=True)
