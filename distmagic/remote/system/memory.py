"""Whether the kernel killed a process for want of memory, and whose memory ran out: the machine's or a cgroup's.

To its parent such an end is a SIGKILL and no more. The kernel's log has the best answer: it names the process and the
bytes that it used. Many users may not read it. Then the counters of the cgroup and of the machine are left, which name
no process.

The log has the pids of the machine's first pid namespace. A container has pids of its own, so there the name decides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distmagic.remote.system.processes import ProcessInfo

_KMSG = "/dev/kmsg"
_LOGS = ("/var/log/kern.log", "/var/log/messages")
_LOG_BYTES = 1 << 20  # read of a log at most
_RECORDS = 10_000  # read of the kernel's ring buffer at most
# The machine's own: PROC_PID_INIT_INO in the kernel's proc_ns.h.
_FIRST_NAMESPACE = "pid:[4026531836]"
_KILLED = re.compile(
    r"Killed process (?P<pid>\d+) \((?P<name>.{0,64}?)\),? (?:UID:? ?\d+,? )?total-vm:\d+kB, "
    r"anon-rss:(?P<anon>\d+)kB, file-rss:(?P<file>\d+)kB(?:, shmem-rss:(?P<shmem>\d+)kB)?"
)
REACHED = "it reached its memory limit"
OF_HOST = "the host ran out of memory"
_OF_CGROUP = "emory cgroup out of memory"
# Bytes; cgroups of version 1 have a larger number where there is no limit.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The kernel's record of one kill. `in_cgroup`: a cgroup's memory had run out, not the machine's."""

    pid: int
    name: str
    used_bytes: int
    in_cgroup: bool


def kills(text: str) -> tuple[Kill, ...]:
    """Return the kills recorded in lines of the kernel's log, in order. Pure."""
    found = []
    cgroup_pids: set[str] = set()
    for line in text.splitlines():
        # Before Linux 5 this is a line of its own, before the record.
        if _OF_CGROUP in line:
            cgroup_pids.update(re.findall(r"[Kk]ill(?:ed)? process (\d+)", line))
        match = _KILLED.search(line)
        if match:
            pid = match["pid"]
            used_kib = (
                int(match["anon"]) + int(match["file"]) + int(match["shmem"] or 0)
            )
            found.append(
                Kill(
                    pid=int(pid),
                    name=match["name"],
                    used_bytes=used_kib << 10,
                    in_cgroup=pid in cgroup_pids,
                )
            )
            cgroup_pids.discard(pid)
    return tuple(found)


def choose(
    found: tuple[Kill, ...], process: ProcessInfo, *, in_container: bool
) -> Kill | None:
    """Return the latest record of this process; in a container, of any process with its name. Pure."""
    for kill in reversed(found):
        if kill.name == process.name and (in_container or kill.pid == process.pid):
            return kill
    return None


def words(kill: Kill, *, total_bytes: int, limit_bytes: int | None) -> str:
    """Return a record in words. `total_bytes` is the machine's memory, `limit_bytes` the cgroup's, None for none. Pure."""
    used = f"kernel: {kill.name} used {_gb(kill.used_bytes)}"
    if kill.in_cgroup:
        limit = (
            f" of the {_gb(limit_bytes)} GB that its cgroup may use"
            if limit_bytes
            else " GB"
        )
        return f"{REACHED} ({used}{limit})"
    return f"{OF_HOST} ({used} of {_gb(total_bytes)} GB)"


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f}"


HOST_WIDE = f"{OF_HOST} and its kernel ended the process"


class Watch:
    """Finds the reason of a SIGKILL in the kernel's log and counters, as far as they changed since this was made."""

    def __init__(self) -> None:
        self._before = _count_of_host()
        self._sizes = {path: _size(path) for path in _LOGS}
        self._kmsg = _open_kmsg()
        self._text = ""

    def why(self, process: ProcessInfo | None, cgroup: Cgroup) -> str:
        """Return why the kernel killed a process, in words; "" where nothing shows that memory ran out.

        `process` is None for a child of a rank, of which only the cgroup is known.
        """
        if process is not None:
            kill = choose(kills(self._log()), process, in_container=_in_container())
            if kill is not None:
                return words(
                    kill, total_bytes=_total_bytes(), limit_bytes=cgroup.limit_bytes
                )
        if cgroup.has_killed():
            limit = f" of {_gb(cgroup.limit_bytes)} GB" if cgroup.limit_bytes else ""
            return f"{REACHED}{limit} (its cgroup has counted a kill)"
        return HOST_WIDE if _count_of_host() > self._before else ""

    def _log(self) -> str:
        """Return the kernel's log since this was made, as far as this user may read it."""
        if self._kmsg >= 0:
            new = records(lambda: os.read(self._kmsg, 8192))
            self._text = (self._text + new)[-_LOG_BYTES:]
            return self._text
        return "\n".join(_read_from(path, size) for path, size in self._sizes.items())


class Cgroup:
    """The memory cgroup of a process, found while the process lives; its files can be read after the process's end."""

    def __init__(self, pid: int, root: Path = Path("/sys/fs/cgroup")) -> None:
        table = _text_of(Path(f"/proc/{pid}/cgroup"))
        self._events, self._limits = _cgroup_files(table, root)
        self._before = self._count()

    @property
    def limit_bytes(self) -> int | None:
        """The memory that the cgroup may use: the lowest limit of it and of all above it, None for none."""
        limits = []
        for path in self._limits:
            text = _text_of(path).strip()
            if text.isdigit() and int(text) < _UNLIMITED:  # else "max"
                limits.append(int(text))
        return min(limits, default=None)

    def has_killed(self) -> bool:
        """Whether the kernel has killed a process in it since this was made."""
        return self._count() > self._before

    def _count(self) -> int:
        return _counted(_text_of(self._events)) if self._events is not None else 0


def _cgroup_files(table: str, root: Path) -> tuple[Path | None, tuple[Path, ...]]:
    """Return the file that counts kills, and the files with the limits of the cgroup and all above it.

    `table` is the text of /proc/PID/cgroup. Return (None, ()) where it names no memory cgroup.
    """
    for line in table.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            folder, events, limit = (
                root / "memory",
                "memory.oom_control",
                "memory.limit_in_bytes",
            )
        elif not controllers and not (root / "memory").exists():
            folder, events, limit = root, "memory.events", "memory.max"
        else:
            continue
        own = folder / path.strip("/")
        if not (own / events).exists():
            # In a container: the path is the machine's, but the container's own cgroup is mounted.
            own = folder
        limits = [own / limit]
        for parent in own.parents:
            if parent == folder or folder in parent.parents:
                limits.append(parent / limit)
        return own / events, tuple(limits)
    return None, ()


def _counted(text: str) -> int:
    """Return the number after `oom_kill` in a table of counters."""
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill":
            return int(number)
    return 0


def _count_of_host() -> int:
    return _counted(_text_of(Path("/proc/vmstat")))


def _total_bytes() -> int:
    found = re.search(r"MemTotal:\s*(\d+) kB", _text_of(Path("/proc/meminfo")))
    return int(found[1]) << 10 if found else 0


def _in_container() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") != _FIRST_NAMESPACE
    except OSError:
        return True


def _open_kmsg() -> int:
    try:
        fd = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(fd, 0, os.SEEK_END)
        os.read(fd, 8192)
    except BlockingIOError:
        return fd  # no new record yet: it can be read
    except OSError:
        return -1  # it may not be read, or does not exist
    return fd


def records(read: Callable[[], bytes]) -> str:
    """Return the lines of the kernel itself among the records of /dev/kmsg.

    Each call of `read` returns one record, "priority,sequence,...;text". Programs can write records too, with another
    priority: those are left out.
    """
    found = []
    for _ in range(_RECORDS):
        try:
            head, _, text = read().decode(errors="replace").partition(";")
        except BrokenPipeError:
            # The record was overwritten before it was read; the next call returns a later one.
            continue
        except OSError:
            break  # there is no more
        priority = head.partition(",")[0]
        if not head:
            break
        if priority.isdigit() and int(priority) < 8:  # facility 0, the kernel's
            found.append(text.partition("\n")[0])
    return "".join(f"{line}\n" for line in found)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read_from(path: str, offset: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(min(offset, _size(path)))
            return file.read(_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
