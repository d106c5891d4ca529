"""Ends what agents left that were killed."""

from __future__ import annotations

import shutil

from distmagic.remote.records import listing, places
from distmagic.remote.system import processes


def sweep_node(job: str, node_rank: int | None) -> tuple[str, ...]:
    """End what is left of a node of a job, and what dead agents left of its other nodes; return what could not be ended.

    An agent of another node goes on, also one that has just been started and has said nothing yet: one host may be several
    nodes of a job, under several names.
    """
    own, own_dir = None, None
    if node_rank is not None:
        own = listing.agent_of(job, node_rank)
        own_dir = places.run_dir(job, node_rank)
    spared, deserted = [], []
    for folder in places.run_dirs(job):
        agent = processes.noted(folder / places.PID)
        if folder == own_dir or (agent is None and places.is_deserted(folder)):
            deserted.append(folder)
        elif agent is not None:
            spared.append(agent)
    for process in processes.marked(job):
        is_own = own is not None and process.pid == own.pid
        if processes.has_role(process, "agent") and not is_own:
            spared.append(process)
    left = processes.sweep(job, spared=spared)
    for folder in deserted:
        shutil.rmtree(folder, ignore_errors=True)
    return tuple(
        f"{process.name} (pid {process.pid}, state {process.state})" for process in left
    )


def sweep_dead() -> None:
    """End what is left of agents that were killed together with their notebook: no other contact came to do it."""
    for job, folders in places.dead_runs().items():
        if any(
            processes.has_role(process, "agent") for process in processes.marked(job)
        ):
            continue  # the agent lives: a cleaner of /tmp has removed its socket
        processes.sweep(job, timeout_s=1.0)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    for folder in (*places.dead_templates(), *places.forgotten()):
        shutil.rmtree(folder, ignore_errors=True)
