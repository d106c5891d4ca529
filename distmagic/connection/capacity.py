"""Whether this machine's limits leave room to reach so many hosts, said before the first of them is reached.

In the middle of a launch the same shortage would be a socket or a thread that can't be made. What one host takes was
measured, and is rounded up: it is the most of it, while the connection is made.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distmagic.errors import SpecError

_SPARE_FILES = 64  # for whatever else the notebook opens meanwhile
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUsage:
    """What one host takes: open files of this process, threads and processes, and megabytes of memory."""

    files: float
    tasks: float
    memory_mb: float


BY_PARAMIKO = HostUsage(files=2, tasks=6, memory_mb=0.3)
# One program keeps the connection, one is the conversation.
BY_SSH_PROGRAM = HostUsage(files=11, tasks=10, memory_mb=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """Something of which each host takes `each`: `used` are in use by now, `limit` is the most, None for no limit.

    `name` and `source` are words for the resource and its limit. `cure` says how to get `{needed}` of it.
    """

    name: str
    source: str
    each: float
    used: int
    limit: int | None
    cure: str

    def needed(self, hosts: int) -> int:
        """Return how much is in use with so many hosts more."""
        return self.used + math.ceil(hosts * self.each)


def shortage(hosts: int, resources: Sequence[Resource]) -> SpecError | None:
    """Return the error that says which limit is too low for so many hosts more, None where there is room. Pure."""
    for one in resources:
        needed = one.needed(hosts)
        if one.limit is not None and needed > one.limit:
            return SpecError(
                f"{hosts:,} hosts at once take {needed:,} {one.name}, and {one.limit:,} are {one.source}.",
                f"{one.cure.format(needed=needed)}, or name fewer hosts.",
            )
    return None


def check(hosts: int, *, by_ssh_program: bool) -> None:
    """Raise `SpecError` if this machine's limits are too low for connections to so many hosts more.

    The soft limit of open files is raised to what they take, as far as the hard one allows.
    """
    if hosts == 0:
        return
    usage = BY_SSH_PROGRAM if by_ssh_program else BY_PARAMIKO
    files = _open_files(usage, None)
    files = _open_files(usage, _allow_files(files.needed(hosts)))
    error = shortage(
        hosts, (files, _tasks_of_user(usage), _tasks_of_cgroup(usage), _memory(usage))
    )
    if error is not None:
        raise error


def _open_files(usage: HostUsage, limit: int | None) -> Resource:
    return Resource(
        name="open files of this process", source="allowed (ulimit -n)", each=usage.files,
        used=len(os.listdir("/dev/fd")) + _SPARE_FILES, limit=limit, cure=_in_the_shell("ulimit -n {needed}"),
    )  # fmt: skip


def _allow_files(wanted: int) -> int | None:
    """Raise the soft limit of open files to `wanted`, at most to the hard one; return the soft limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        higher = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        # Some systems have a lower limit than they say.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (higher, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _tasks_of_user(usage: HostUsage) -> Resource:
    """Return the threads and processes of this user. Linux does not count those of root, other systems no threads."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    is_limited = (
        Path("/proc/self/task").exists()
        and os.geteuid() != 0
        and limit != resource.RLIM_INFINITY
    )
    return Resource(
        name="threads and processes of this user", source="allowed (ulimit -u)", each=usage.tasks,
        used=_count_tasks() if is_limited else 0, limit=limit if is_limited else None,
        cure=_in_the_shell("ulimit -u {needed}"),
    )  # fmt: skip


def _count_tasks() -> int:
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if process.stat().st_uid == os.geteuid():
                count += len(os.listdir(process / "task"))
    return count


def _tasks_of_cgroup(usage: HostUsage) -> Resource:
    """Return the threads and processes of this container or log-in session: of the cgroup (version 2) of this process."""
    folder = _CGROUPS / _own_cgroup()
    limit = _text(folder / "pids.max").strip()
    return Resource(
        name="threads and processes of this container or session", source="allowed (pids.max of its cgroup)",
        each=usage.tasks, used=int(_text(folder / "pids.current").strip() or 0),
        limit=int(limit) if limit.isdigit() else None,
        cure="Start it with a higher limit (docker run --pids-limit {needed}; TasksMax={needed} of systemd)",
    )  # fmt: skip


def _own_cgroup() -> str:
    return _text(Path("/proc/self/cgroup")).partition("0::/")[2].strip()


def _memory(usage: HostUsage) -> Resource:
    available_kb = (
        _text(Path("/proc/meminfo")).partition("MemAvailable:")[2].split()[:1]
    )
    return Resource(
        name="MB of memory", source="free", each=usage.memory_mb, used=0,
        limit=int(available_kb[0]) // 1000 if available_kb else None, cure="End what else uses memory here",
    )  # fmt: skip


def _in_the_shell(command: str) -> str:
    return f"Run `{command}` in the shell that starts this notebook (an administrator may have to allow it)"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
