"""Which processes use GPUs, seen from outside: by NVIDIA's own list, and by the device files that they have open."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

_DEVICE = re.compile(r"/dev/nvidia\S*")
_SMI = "nvidia-smi"


def compute_pids(listed: str) -> frozenset[int]:
    """Return the pids in what `nvidia-smi --query-compute-apps=pid --format=csv,noheader` prints."""
    lines = (line.strip() for line in listed.splitlines())
    # Else "[Not Found]", or a sentence.
    return frozenset(int(line) for line in lines if line.isdecimal())


def uuids(listed: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the UUIDs of GPUs, and those of their MIG instances, in what `nvidia-smi -L` prints."""
    found = re.findall(r"\(UUID: ((?:GPU|MIG)-[^)\s]+)\)", listed)
    gpus = tuple(uuid for uuid in found if uuid.startswith("GPU-"))
    return gpus, tuple(uuid for uuid in found if uuid.startswith("MIG-"))


def ask_smi(*arguments: str) -> str:
    """Return what nvidia-smi prints, "" where there is none."""
    try:
        done = subprocess.run(
            [_SMI, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout


def processes_with_contexts() -> frozenset[int]:
    """Return the pids of all processes that have a context on a GPU, as the driver knows them.

    In a container these may be pids of the machine, or none at all.
    """
    return compute_pids(ask_smi("--query-compute-apps=pid", "--format=csv,noheader"))


def total_mib(listed: str) -> int | None:
    """Return the sum of what `nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits` prints; None for no sum.

    A GPU that MIG has divided does not tell.
    """
    lines = [line.strip() for line in listed.splitlines()]
    return sum(map(int, lines)) if lines and all(map(str.isdecimal, lines)) else None


def used_mib() -> int | None:
    """Return how much memory of all GPUs is in use, by whomever, also in other containers; None where nothing tells."""
    return total_mib(
        ask_smi("--query-gpu=memory.used", "--format=csv,noheader,nounits")
    )


def open_devices(pid: int, proc: Path = Path("/proc")) -> frozenset[str]:
    """Return the device files of NVIDIA that a process has open, or mapped; none for a process that has ended."""
    found: set[str] = set()
    try:
        for fd in (proc / str(pid) / "fd").iterdir():
            try:
                found.update(_DEVICE.findall(os.readlink(fd)))
            except OSError:
                continue  # closed meanwhile
        found.update(_DEVICE.findall((proc / str(pid) / "maps").read_text()))
    except OSError:
        pass  # it has ended, or is another user's
    return frozenset(found)


def processes_with_devices(proc: Path = Path("/proc")) -> frozenset[int]:
    """Return the pids of all processes that have a GPU's device file open. `/dev/nvidiactl` alone is no GPU.

    It need not be a context: cuInit, with which CUDA counts GPUs, opens the same files, /dev/nvidia-uvm among them.
    """
    found = set()
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            names = open_devices(int(folder.name), proc)
            if any(re.fullmatch(r"/dev/nvidia\d+", name) for name in names):
                found.add(int(folder.name))
    return frozenset(found)


def parent_of(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the pid of a process's parent, 0 where it has ended."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])
