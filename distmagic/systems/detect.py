"""Which system has started this process, by its variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from distmagic.inside.job_node import JobNode
from distmagic.remote.system import processes
from distmagic.systems.osmo import inside as osmo
from distmagic.systems.sing import inside as sing
from distmagic.systems.skypilot import inside as skypilot
from distmagic.systems.slurm import inside as slurm
from distmagic.systems.torchrun import inside as torchrun

# What torchrun has started has its variables and those of the system around it. A SkyPilot cluster on Slurm has
# Slurm's variables too, of a step that SkyPilot made. RANK may have been set, from Slurm's variables, for torch alone.
_SYSTEMS = (
    torchrun.started,
    skypilot.place,
    sing.place,
    osmo.place,
    slurm.place,
    torchrun.by_variables,
)


def detect(environ: Mapping[str, str]) -> JobNode | None:
    """Return the place of this process among the nodes of a job, None outside any; a job of one process is none.

    Raises `SpecError` that names variables that are half-set or contradict each other.
    """
    if environ.get(processes.MARK):
        return None  # a rank of a run of ours
    for place_in in _SYSTEMS:
        found = place_in(environ)
        if found is not None:
            return found if found.nnodes > 1 or found.task is not None else None
    return None
