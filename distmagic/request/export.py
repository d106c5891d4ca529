"""The request of `--export SYSTEM DIR`: a folder that starts the same job on a cluster.

It checks its values. Pure.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import field

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.request.allocation import check_nodes, check_option
from distmagic.request.flag_values import Pairs, refuse_zero_bytes
from distmagic.request.systems import by_name, that_can

IMAGE = "pytorch/pytorch:latest"
# The sbatch options that other systems also support.
_FOR_ALL = ("gpus-per-node", "cpus-per-task", "mem")
_GIB = {"K": 1 / 1024**2, "M": 1 / 1024, "": 1 / 1024, "G": 1, "T": 1024}


@frozen
class Gpus:
    """The GPUs of one node. `kind` is "" if not given."""

    count: int
    kind: str = ""


@frozen
class ExportRequest:
    """A request to write a folder for a system of systems.py.

    Raises `UsageError`.
    """

    system: str
    folder: str
    nodes: int | None = None  # None if not given
    # sbatch's, by their long names, "" for a switch; other systems accept a few
    options: Pairs = ()
    # shell code that every node runs first; it may hold secrets
    setup: str = field(default="", repr=False)
    image: str = IMAGE  # a container image
    # an OSMO dataset, or a URL, for files that the first node's ranks write
    results: str = ""

    def __post_init__(self) -> None:
        system = by_name().get(self.system)
        if system is None or "export" not in system.can:
            names = [system.name for system in that_can("export")]
            close = difflib.get_close_matches(self.system, names, n=1)
            guess = f"Did you mean {close[0]}? " if close else ""
            raise UsageError(
                f"--export {self.system!r} is not known.",
                f"{guess}Use one of: {', '.join(names)}.",
            )
        if not self.folder:
            raise UsageError(
                "--export names no folder.", f"Write --export {self.system} DIR."
            )
        if self.nodes is not None:
            check_nodes(self.nodes)
        for name, value in self.options:
            check_option(name, value)
            if not system.takes_options and name not in _FOR_ALL:
                raise UsageError(
                    f"--{name} is Slurm's, and --export {self.system} has no place for it.",
                    "Leave it out.",
                )
        refuse_zero_bytes(self)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", self.image):
            raise UsageError(
                f"--image {self.image!r} is not the name of a container image.",
                f"Write it as docker pull takes it: {IMAGE}.",
            )
        if self.results and not re.fullmatch(
            r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?|[a-z0-9]+://[A-Za-z0-9._/@:+-]+",
            self.results,
        ):
            raise UsageError(
                f"--results {self.results!r} is neither a dataset's name nor a URL.",
                "Write --results my-results, or --results s3://bucket/folder.",
            )
        _ = self.gpus, self.cpus, self.memory_gib  # each checks its option

    @property
    def chooses_hosts(self) -> bool:
        """Whether the system chooses hosts itself, so that the user names none."""
        return by_name()[self.system].chooses_hosts

    def option(self, name: str) -> str:
        """Return the value of one of `options`, "" if not given."""
        return dict(self.options).get(name, "")

    @property
    def gpus(self) -> Gpus | None:
        """The GPUs of each node, None if not given."""
        text = self.option("gpus-per-node")
        if not text:
            return None
        found = re.fullmatch(r"(?:([A-Za-z][A-Za-z0-9_.-]*):)?(\d{1,4})", text)
        if found is None:
            raise UsageError(
                f"--gpus-per-node {text!r} is not a number of GPUs.",
                "Write --gpus-per-node 4, or with their kind: L4:4.",
            )
        return Gpus(kind=found[1] or "", count=int(found[2]))

    @property
    def cpus(self) -> int:
        """The CPUs of each node, 0 if not given."""
        text = self.option("cpus-per-task")
        if text and not re.fullmatch(r"[1-9]\d{0,4}", text):
            raise UsageError(
                f"--cpus-per-task {text!r} is not a number of CPUs.",
                "Write --cpus-per-task 8.",
            )
        return int(text or 0)

    @property
    def memory_gib(self) -> int:
        """The memory of each node in GiB, rounded up, 0 if not given.

        A number without a unit is in MiB, as in Slurm, which gets the text unchanged.
        """
        text = self.option("mem")
        found = re.fullmatch(r"(\d{1,9})([KMGT]?)", text.upper() or "0")
        if found is None:
            raise UsageError(f"--mem {text!r} is not a size.", "Write --mem 64G.")
        return math.ceil(int(found[1]) * _GIB[found[2]])
