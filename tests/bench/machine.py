"""What machine this is, in a line: figures mean nothing without it."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe() -> str:
    """Return processor, cores, memory, system and Python."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in _lines("/proc/cpuinfo")
            if "model name" in line
        ),
        "",
    )
    memory = next(
        (
            int(line.split()[1])
            for line in _lines("/proc/meminfo")
            if line.startswith("MemTotal")
        ),
        0,
    )
    parts = (
        f"{len(os.sched_getaffinity(0))} cores",
        cpu or platform.machine(),
        f"{memory / (1 << 20):.0f} GiB",
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}",
    )
    return ", ".join(parts)


def load() -> float:
    """Return how many processes wanted to run in the last minute, on average."""
    return os.getloadavg()[0]


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
