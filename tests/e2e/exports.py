"""Exports a program to a folder that all hosts of a lab see, runs lines on hosts, and reads what ranks have left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tests.builders.exports import HOSTILE
from tests.lab import Lab
from tests.lab.host import LabHost

# Each rank leaves what it was given and what it found in a file beside it.
TRAIN = """
import json
import os
import socket
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([rank + 1])
dist.all_reduce(total)
found = {
    "total": int(total),
    "world": dist.get_world_size(),
    "host": socket.gethostname(),
    "args": sys.argv[1:],
    "local_rank": os.environ["LOCAL_RANK"],
    "variables": {name: value for name, value in os.environ.items() if name.startswith("MY_")},
}
with open(f"rank-{rank}.json", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()  # first: torch now and then aborts an exit with a group
if sys.argv[1:] == ["fail"] and rank == 1:
    sys.exit(7)
"""
VARIABLES = {f"MY_{place}": value for place, value in enumerate(HOSTILE)}


class Export(Protocol):
    """Exports TRAIN with these flags and arguments, and returns the folder."""

    def __call__(self, lab: Lab, *flags: str, args: tuple[str, ...] = ()) -> Path:
        """Flags begin with the system's name."""


@contextmanager
def exporter(own: Path) -> Iterator[Export]:
    """Give what exports TRAIN from the folder `own`; what it wrote goes at the end."""
    made: list[Path] = []

    def write(lab: Lab, *flags: str, args: tuple[str, ...] = ()) -> Path:
        (own / "train.py").write_text(TRAIN)
        folder = lab.folder / "exports" / own.name
        made.append(folder)
        system, *others = flags
        words = ["--export", system, str(folder), "--python", "python3", *others]
        command = [
            sys.executable,
            "-m",
            "distmagic.cli",
            "run",
            *words,
            "train.py",
            *args,
        ]
        subprocess.run(command, cwd=own, check=True, capture_output=True)
        return folder

    yield write
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


def results(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what each rank has left, by rank; and take it away for the next run."""
    found = {}
    for path in sorted((folder / "program").glob("rank-*.json")):
        found[int(path.stem.partition("-")[2])] = json.loads(path.read_text())
        path.unlink()
    return found


@dataclasses.dataclass(frozen=True)
class Node:
    """What one node of a platform runs, and what the platform sets there."""

    line: str
    variables: dict[str, str]


def at_once(
    hosts: tuple[LabHost, ...], nodes: list[Node], timeout_s: float = 150
) -> list[subprocess.CompletedProcess[str]]:
    """Run a line of bash on each host, all at the same time; as platforms do, end all when one fails."""

    def run(host: LabHost, node: Node) -> subprocess.CompletedProcess[str]:
        set_by = [f"{name}={value}" for name, value in node.variables.items()]
        line = ["env", *set_by, "bash", "-c", node.line]
        done = host.exec(line, timeout_s=timeout_s)
        if done.returncode != 0:
            for other in hosts:
                _end(other)
        return done

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(run, hosts, nodes))


def _end(host: LabHost) -> None:
    """End what starts ranks on a host, and the ranks, as a platform ends a container in the end."""
    for process in host.processes():
        if process.cmdline[:1] and "train.py" in process.cmdline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.outer_pid, signal.SIGKILL)


def check_four_ranks(found: dict[int, dict[str, Any]]) -> None:
    """Two hosts had two ranks each, all of one world."""
    assert sorted((one["host"], one["local_rank"]) for one in found.values()) == [
        ("dm1", "0"),
        ("dm1", "1"),
        ("dm2", "0"),
        ("dm2", "1"),
    ]
    assert {(one["total"], one["world"]) for one in found.values()} == {(10, 4)}
