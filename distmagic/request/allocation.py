"""What is asked of a scheduler: `--on slurm` and the flags that go with it, checked. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from distmagic.errors import SpecError
from distmagic.request.hosts import parse_host

IDLE_S = 900.0
_MOST_NODES = 10_000
_CLUSTER = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # as SkyPilot takes it
# Options of sbatch that this project gives itself, or that would make something else of the job.
_OURS = {
    "parsable": "", "comment": "", "output": "", "error": "", "input": "", "requeue": "", "no-requeue": "", "no-kill": "",
    "nodes": "Write --nodes N.", "wait": "", "wrap": "", "array": "", "test-only": "", "batch": "", "chdir": "",
    "clusters": "Set SLURM_CLUSTERS where sbatch is run.", "ntasks": "The ranks are started later: --nproc-per-node.",
    "ntasks-per-node": "The ranks are started later: --nproc-per-node.", "job-name": "", "export": "Use --setup or --env.",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRequest:
    """An allocation of Slurm that a cell wants.

    `login` is the host on which Slurm's commands are run, as after `--hosts`; "" is this machine. `job` is the number of
    an allocation that exists, "" where one is to be submitted. `options` are sbatch's own, by their long names, ""
    being the value of a switch. `setup` is shell that every node runs first. After `idle_s` seconds without a job the
    allocation ends. Raises `SpecError`.
    """

    login: str = ""
    job: str = ""
    nodes: int = 1
    options: tuple[tuple[str, str], ...] = ()
    setup: str = field(default="", repr=False)  # may hold secrets
    idle_s: float = IDLE_S

    def __post_init__(self) -> None:
        if self.login:
            parse_host(self.login)
        if not 1 <= self.nodes <= _MOST_NODES:
            raise SpecError(
                f"--nodes {self.nodes} is no number of nodes.",
                f"Use 1 to {_MOST_NODES:,}.",
            )
        for name, value in self.options:
            check_option(name, value)
        if "\0" in self.setup:
            raise SpecError("--setup has a zero byte in it.", "A shell can't read one.")
        if not self.idle_s > 0:
            raise SpecError(
                f"--idle {self.idle_s:g} is not a time.", "Write --idle 15m."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """A cluster of SkyPilot that a cell wants: `name` is one that exists. `nodes` is how many it will have, 0 for unknown.

    Raises `SpecError`.
    """

    name: str = ""
    nodes: int = 0

    def __post_init__(self) -> None:
        if not _CLUSTER.fullmatch(self.name):
            raise SpecError(
                f"{self.name!r} is no name of a cluster.",
                "Write --on sky:NAME, with a name that sky status shows.",
            )


def check_option(name: str, value: str) -> None:
    """Raise `SpecError` for an option of sbatch that a user can't give, or a value that it can't have."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise SpecError(
            f"--slurm {name!r} is no option of sbatch.",
            "Write its long name: --slurm cpus-per-task=8.",
        )
    if name in ("gpus", "gpus-per-socket"):
        raise SpecError(
            f"--{name} counts GPUs of the whole job, and a step on one node can't have any then.",
            "Write --gpus-per-node N.",
        )
    if name in _OURS:
        raise SpecError(
            f"--slurm {name}: distmagic gives sbatch this option itself.",
            _OURS[name] or "Leave it out.",
        )
    if re.search(r"[\n\r\0]", value):
        raise SpecError(
            f"--{name} has a line break or a zero byte in it.",
            "Options of sbatch are one line each.",
        )


def is_cluster(place: str) -> bool:
    """Whether what follows `--on` is a cluster of SkyPilot: sky, or sky:NAME."""
    return place.partition(":")[0] == "sky"


def cluster_of(place: str, resources: Iterable[tuple[str, object]]) -> ClusterRequest:
    """Return the cluster after `--on`; `resources` are what else the line says of nodes. Raises `SpecError`."""
    for name, value in resources:
        if value is not None:
            raise SpecError(
                f"--{name} is for nodes that are asked for, and {place} has its hosts already.",
                "Leave it out.",
            )
    return ClusterRequest(name=place.partition(":")[2])


def parse_place(text: str) -> tuple[str, str]:
    """Return (log-in host, job) of what follows `--on`: slurm, slurm:LOGIN, slurm:JOB or slurm:LOGIN:JOB.

    A part of digits alone is a job. Raises `SpecError`.
    """
    system, _, place = text.partition(":")
    if system != "slurm":
        raise SpecError(
            f"--on {text!r} is not known.",
            "Write --on slurm, --on slurm:LOGIN with the name of a log-in node, or --on sky:NAME.",
        )
    login, colon, job = place.rpartition(":")
    if place.isdecimal():
        return "", place
    if colon and job.isdecimal() and not login.endswith(":"):
        return login, job
    return place, ""
