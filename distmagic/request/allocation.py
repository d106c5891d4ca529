"""Requests to systems that provide hosts, in the form for `distmagic.run`; they check their values.

Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.request.flag_values import Pairs, refuse_zero_bytes
from distmagic.request.hosts import parse_host

IDLE_S = 900.0
_MOST_NODES = 10_000
_CLUSTER = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # valid for SkyPilot
_GPUS = re.compile(r"[A-Za-z][A-Za-z0-9._-]*(:[0-9]+(\.[0-9]+)?)?")
# Options of sbatch that distmagic sets itself, or that would change the kind of job.
_OURS = {
    "parsable": "", "comment": "", "output": "", "error": "", "input": "", "requeue": "", "no-requeue": "", "no-kill": "",
    "nodes": "Write --nodes N.", "wait": "", "wrap": "", "array": "", "test-only": "", "batch": "", "chdir": "",
    "clusters": "Set SLURM_CLUSTERS where sbatch is run.", "ntasks": "The ranks are started later: --nproc-per-node.",
    "ntasks-per-node": "The ranks are started later: --nproc-per-node.", "job-name": "", "export": "Use --setup or --env.",
}  # fmt: skip


@dataclass(frozen=True)
class HostsRequest:
    """A request for hosts that were not named one by one. `system` is the name of the system."""

    system: ClassVar[str]

    @property
    def is_there(self) -> bool:
        """Whether the request names hosts that exist, so that none have to be requested."""
        return False


@frozen
class SlurmRequest(HostsRequest):
    """A request for a Slurm allocation.

    Raises `UsageError`.
    """

    system: ClassVar[str] = "slurm"
    # the host for Slurm's commands, as after `--hosts`; "" is this machine
    login: str = ""
    job: str = ""  # ID of an existing allocation, "" to submit a new one
    nodes: int = 1
    # sbatch's, by their long names, "" for a switch
    options: Pairs = ()
    # shell code that every node runs first; it may hold secrets
    setup: str = field(default="", repr=False)
    idle_s: float = IDLE_S  # after so many seconds without a job the allocation ends

    def __post_init__(self) -> None:
        if self.login:
            parse_host(self.login)
        check_nodes(self.nodes)
        for name, value in self.options:
            check_option(name, value)
        refuse_zero_bytes(self)
        _check_idle(self.idle_s)

    @property
    def is_there(self) -> bool:
        """Whether the request names an existing allocation."""
        return bool(self.job)


@frozen
class SkyRequest(HostsRequest):
    """A request for a SkyPilot cluster.

    Raises `UsageError`.
    """

    system: ClassVar[str] = "skypilot"
    name: str = ""  # an existing cluster, "" to launch a new one
    nodes: int = 0  # size of a new cluster; 0: from the task, else 1
    gpus: str = ""  # type and number for each node of a new cluster: "L4:4"
    file: str = ""  # a SkyPilot task with resources and set-up
    idle_s: float = IDLE_S  # after so many seconds without a job the cluster ends

    def __post_init__(self) -> None:
        refuse_zero_bytes(self)
        if self.name and not _CLUSTER.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} is not the name of a cluster.",
                "Write --on sky:NAME, with a name that sky status shows.",
            )
        check_nodes(self.nodes, least=0)
        if self.gpus and not _GPUS.fullmatch(self.gpus):
            raise UsageError(
                f"--gpus {self.gpus!r} is not a type of GPU.",
                "Write the kind and number of each node: --gpus L4:4; sky gpus list shows them.",
            )
        _check_idle(self.idle_s)

    @property
    def is_there(self) -> bool:
        """Whether the request names an existing cluster."""
        return bool(self.name)


def check_nodes(nodes: int, least: int = 1) -> None:
    """Raise `UsageError` for an invalid number of nodes."""
    if not least <= nodes <= _MOST_NODES:
        raise UsageError(
            f"--nodes {nodes} is not a number of nodes.", f"Use 1 to {_MOST_NODES:,}."
        )


def _check_idle(idle_s: float) -> None:
    if not idle_s > 0:
        raise UsageError(f"--idle {idle_s:g} is not a time.", "Write --idle 15m.")


def check_option(name: str, value: str) -> None:
    """Raise `UsageError` for an sbatch option that users can't set, or an invalid value."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise UsageError(
            f"--slurm {name!r} is not an option of sbatch.",
            "Write its long name: --slurm cpus-per-task=8.",
        )
    if name in ("gpus", "gpus-per-socket"):
        raise UsageError(
            f"--{name} counts GPUs of the whole job, so the processes of one node get none.",
            "Write --gpus-per-node N.",
        )
    if name in _OURS:
        raise UsageError(
            f"--slurm {name}: distmagic gives sbatch this option itself.",
            _OURS[name] or "Leave it out.",
        )
    if re.search(r"[\n\r\0]", value):
        raise UsageError(
            f"--{name} has a line break or a zero byte in it.",
            "Options of sbatch are one line each.",
        )
