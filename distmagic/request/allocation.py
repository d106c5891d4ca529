"""What is asked of a scheduler: `--on slurm` and the flags that go with it, checked. Pure, but for `sky_task`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distmagic.errors import SpecError
from distmagic.request.flag_values import refuse_zero_bytes
from distmagic.request.hosts import parse_host

IDLE_S = 900.0
_MOST_NODES = 10_000
_CLUSTER = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # as SkyPilot takes it
_GPUS = re.compile(r"[A-Za-z][A-Za-z0-9._-]*(:[0-9]+(\.[0-9]+)?)?")
# Options of sbatch that this project gives itself, or that would make something else of the job.
_OURS = {
    "parsable": "", "comment": "", "output": "", "error": "", "input": "", "requeue": "", "no-requeue": "", "no-kill": "",
    "nodes": "Write --nodes N.", "wait": "", "wrap": "", "array": "", "test-only": "", "batch": "", "chdir": "",
    "clusters": "Set SLURM_CLUSTERS where sbatch is run.", "ntasks": "The ranks are started later: --nproc-per-node.",
    "ntasks-per-node": "The ranks are started later: --nproc-per-node.", "job-name": "", "export": "Use --setup or --env.",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest:
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
        refuse_zero_bytes(self)
        if not self.idle_s > 0:
            raise SpecError(
                f"--idle {self.idle_s:g} is not a time.", "Write --idle 15m."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyRequest:
    """A cluster of SkyPilot that a cell wants: `name` is one that exists, "" where one is to be launched.

    Of that, `nodes` is its size (0: as the task says, else 1), `gpus` the kind and number of each node's ("L4:4"), `file`
    a task of SkyPilot whose resources and set-up it gets. Without a job for `idle_s` it ends. Raises `SpecError`.
    """

    name: str = ""
    nodes: int = 0
    gpus: str = ""
    file: str = ""
    idle_s: float = IDLE_S

    def __post_init__(self) -> None:
        refuse_zero_bytes(self)
        if self.name and not _CLUSTER.fullmatch(self.name):
            raise SpecError(
                f"{self.name!r} is no name of a cluster.",
                "Write --on sky:NAME, with a name that sky status shows.",
            )
        if not 0 <= self.nodes <= _MOST_NODES:
            raise SpecError(
                f"--nodes {self.nodes} is no number of nodes.",
                f"Use 1 to {_MOST_NODES:,}.",
            )
        if self.gpus and not _GPUS.fullmatch(self.gpus):
            raise SpecError(
                f"--gpus {self.gpus!r} is no kind of GPU.",
                "Write the kind and number of each node: --gpus L4:4; sky gpus list shows them.",
            )
        if not self.idle_s > 0:
            raise SpecError(
                f"--idle {self.idle_s:g} is not a time.", "Write --idle 15m."
            )


# What gives hosts that were not named one by one.
HostsRequest = SlurmRequest | SkyRequest


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


def cluster_of(
    place: str,
    asked: Mapping[str, object],
    of_slurm: Iterable[str] = (),
) -> SkyRequest:
    """Return the cluster after `--on`: sky:NAME, or sky, which is launched as `asked` says, by the names of its fields.

    `of_slurm` are options of the line that only Slurm is told. Raises `SpecError`.
    """
    for option in of_slurm:
        cure = "Write what a node has to have into a task of SkyPilot: --sky FILE.yaml."
        if option == "gpus-per-node":
            cure = "Write --gpus KIND:N, such as --gpus L4:4."
        raise SpecError(
            f"--{option} is for Slurm, and --on {place} asks SkyPilot.", cure
        )
    name = place.partition(":")[2]
    known = {field: value for field, value in asked.items() if value is not None}
    if ":" in place and known:
        raise SpecError(
            f"{place} has its hosts already.",
            "Leave out --nodes, --gpus, --sky and --idle; --on sky launches another cluster.",
        )
    if ":" in place and not name:
        raise SpecError(
            f"--on {place} names no cluster.",
            "Write --on sky:NAME, or --on sky for a new one.",
        )
    return SkyRequest(name=name, **known)  # type: ignore[arg-type]


def check_not_of_cluster(gpus: str | None, file: str | None) -> None:
    """Raise `SpecError` for what only a cluster of SkyPilot is launched with."""
    if gpus is not None:
        raise SpecError(
            "--gpus is for --on sky.",
            "Slurm and exported files take --gpus-per-node; the number of ranks on each host is --nproc-per-node.",
        )
    if file is not None:
        raise SpecError("--sky is for --on sky.", "Add --on sky, or leave it out.")


def sky_task(path: str) -> str:
    """Return the path of a task of SkyPilot that only sets hosts up. Raises `SpecError`."""
    try:
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text file"
        raise SpecError(f"--sky {path}: {why}.", "Check the path.") from None
    if re.search(r"^[\"']?run[\"']?\s*:", text, re.MULTILINE):
        raise SpecError(
            f"--sky {path} has a run: block, which SkyPilot would run beside the cell.",
            "Take it out; resources, setup and file_mounts are what is used.",
        )
    return str(Path(os.path.expanduser(path)).absolute())


def parse_place(text: str) -> tuple[str, str]:
    """Return (log-in host, job) of what follows `--on`: slurm, slurm:LOGIN, slurm:JOB or slurm:LOGIN:JOB.

    A part of digits alone is a job. Raises `SpecError`.
    """
    system, _, place = text.partition(":")
    if system == "sing":
        raise SpecError(
            "--on sing: SING Cloud has no public program that a notebook could use.",
            "--export sing DIR writes the image of such a job; inside one no --on is needed.",
        )
    if system != "slurm":
        raise SpecError(
            f"--on {text!r} is not known.",
            "Write --on slurm, --on slurm:LOGIN with the name of a log-in node, --on sky, --on sky:NAME, --on osmo or --on none.",
        )
    login, colon, job = place.rpartition(":")
    if place.isdecimal():
        return "", place
    if colon and job.isdecimal() and not login.endswith(":"):
        return login, job
    return place, ""
