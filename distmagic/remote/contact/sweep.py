"""Ends what agents left that were killed."""

from __future__ import annotations

import shutil

from distmagic.remote.records import places
from distmagic.remote.system import processes


def sweep_node(job: str, node_rank: int | None) -> tuple[str, ...]:
    """End what is left of a node of a job, and what dead agents left of its other nodes; return what could not be ended.

    An agent of another node goes on: one host may be several nodes of a job, under several names.
    """
    own = None
    if node_rank is not None:
        own = places.run_dir(job, node_rank)
    spared = []
    deserted = []
    for folder in places.run_dirs(job):
        agent = processes.noted(folder / places.PID)
        if agent is not None and folder != own:
            spared.append(agent)
        else:
            deserted.append(folder)
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
