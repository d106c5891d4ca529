"""What a process holds on to, and what lies on a host: looked at from outside, through /proc."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from distmagic.remote.contact.boot import BOOTSTRAP
from tests.lab.host import LabHost
from tests.lab.processes import HostProcess
from tests.lab.waiting import wait_until

# The last words of what distmagic keeps on a host between two runs: contact, template.
_KEPT = (BOOTSTRAP, "template")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one process holds.

    `descriptors` has the kind of each: "socket", "pipe" or the path of a file. `files` are those below its temporary
    directory, removed ones that it has mapped too.
    """

    descriptors: tuple[str, ...]
    threads: int
    memory_mb: float
    files: int


def of_process(pid: int, temporary: Path) -> Held:
    """Return what a process holds whose temporary directory is `temporary`."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    removed = {
        line.split(maxsplit=5)[5]
        for line in maps
        if str(temporary) in line and line.endswith("(deleted)")
    }
    return Held(
        descriptors=_descriptors(pid),
        threads=len(os.listdir(f"/proc/{pid}/task")),
        memory_mb=memory_mb(pid),
        files=len(removed) + sum(not path.is_dir() for path in temporary.rglob("*")),
    )


def added(now: Held, before: Held) -> list[str]:
    """Return what a process holds that it did not hold before, memory aside."""
    more = Counter(now.descriptors) - Counter(before.descriptors)
    found = [f"{count} more {kind}" for kind, count in sorted(more.items())]
    if now.threads > before.threads:
        found.append(f"{now.threads - before.threads} more threads")
    if now.files > before.files:
        found.append(f"{now.files - before.files} more temporary files")
    return found


def _descriptors(pid: int) -> tuple[str, ...]:
    kinds = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            kinds.append(re.sub(r":\[\d+\]$", "", str(descriptor.readlink())))
    return tuple(sorted(kinds))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOnHost:
    """What distmagic has on a host between two runs: processes and what they hold, files in /tmp, in blobs, of jobs."""

    processes: int
    descriptors: int
    memory_mb: float
    temporary: int
    blobs: int
    jobs: int


def on_host(host: LabHost) -> HeldOnHost:
    """Return what is on a host, as soon as nothing runs there that belongs to a run."""
    wait_until(lambda: _is_at_rest(host), f"{host.name} to be at rest")
    pids = [one.outer_pid for one in host.processes() if _is_kept(one)]
    own = host.home / ".distmagic"
    return HeldOnHost(
        processes=len(pids),
        descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        memory_mb=sum(memory_mb(pid) for pid in pids),
        temporary=len(host.files("/tmp")),
        blobs=len(os.listdir(own / "blobs")),
        jobs=len(os.listdir(own / "jobs")),
    )


def _is_at_rest(host: LabHost) -> bool:
    return all(_is_kept(one) for one in host.processes() if one.is_of_distmagic)


def _is_kept(process: HostProcess) -> bool:
    # What is about to end, or in the middle of an exec, has no words.
    return bool(process.cmdline) and process.cmdline[-1] in _KEPT


def memory_mb(pid: int) -> float:
    """Return the memory of a process in MB, without pages of files: whatever else maps the same libraries has no part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return (
        next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
        / 1024
    )
