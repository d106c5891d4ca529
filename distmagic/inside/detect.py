"""Detects the system that has started this process, by its variables. Pure."""

from __future__ import annotations

from distmagic.inside.job_node import Environ, JobNode
from distmagic.inside.torch_variables import by_variables
from distmagic.remote.system import processes
from distmagic.request.systems import that_can


def detect(environ: Environ) -> JobNode | None:
    """Return the place of this process in its job; None outside of any, and for a job with one
    process.

    Raises `UsageError` about incomplete or contradicting variables.
    """
    if environ.get(processes.MARK):
        return None  # a rank of a distmagic run
    # A process under torchrun also has the variables of the surrounding system. A SkyPilot cluster
    # on Slurm has Slurm's variables too, of SkyPilot's step. RANK may have been set from Slurm's
    # variables, only for torch.
    ways = [system.part("inside").place for system in reversed(that_can("inside"))]
    for place_in in (*ways, by_variables):
        found: JobNode | None = place_in(environ)
        if found is not None:
            return found if found.nnodes > 1 or found.task is not None else None
    return None
