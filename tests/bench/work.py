"""The job that every tool is given, as text, and when its ranks began with it.

The first user line is the first one after `import torch`: a rank writes the time there, into a folder that all hosts
of the lab see.
"""

from __future__ import annotations

import itertools
from pathlib import Path

SOURCE = """
import os, time
import torch
import torch.distributed as dist

def work(folder, group="own", **env):
    began = time.time()
    os.environ.update({name: str(value) for name, value in env.items()})
    with open(f"{folder}/{os.environ['RANK']}", "w") as file:
        file.write(repr(began))
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if group == "own":
        dist.destroy_process_group()
    assert total.item() == 4, total
    return int(os.environ["RANK"])
"""
RANKS = 4
_NUMBERS = itertools.count(1)


class Stamps:
    """A folder for the times of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / f"run-{next(_NUMBERS)}"
        self.folder.mkdir(parents=True)

    def last_at(self) -> float:
        """Return when the last rank began, in seconds since the epoch. Raises AssertionError if one never did."""
        times = {file.name: float(file.read_text()) for file in self.folder.iterdir()}
        assert len(times) == RANKS, f"{sorted(times)} of {RANKS} ranks began"
        return max(times.values())
