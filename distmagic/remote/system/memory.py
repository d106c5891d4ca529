"""Whether, and why, the kernel killed a process for want of memory: its own words, where this user may read them.

The kernel's log knows processes by the numbers of the whole machine, a container by its own; there the name decides.
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
_LOG_BYTES = 1 << 20  # of a log, at most, are read
_RECORDS = 10_000  # of the kernel's ring, at most
_FIRST_NAMESPACE = "pid:[4026531836]"  # of the machine itself: proc_ns.h, PROC_PID_INIT_INO
_KILLED = re.compile(
    r"Killed process (?P<pid>\d+) \((?P<name>.{0,64}?)\),? (?:UID:? ?\d+,? )?total-vm:\d+kB, "
    r"anon-rss:(?P<anon>\d+)kB, file-rss:(?P<file>\d+)kB(?:, shmem-rss:(?P<shmem>\d+)kB)?"
)
_OF_CGROUP = "emory cgroup out of memory"
_UNLIMITED = 1 << 60  # bytes; cgroups of version 1 say "no limit" by a number of this size


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The kernel's record of one kill: whose memory ran out is the machine's, or that of a cgroup."""

    pid: int
    name: str
    used_bytes: int
    in_cgroup: bool


def kills(text: str) -> tuple[Kill, ...]:
    """Return the kills that lines of the kernel's log tell of, in order. Pure."""
    found = []
    cgroup_pids: set[str] = set()
    for line in text.splitlines():
        if _OF_CGROUP in line:  # before Linux 5 on a line of its own, in front
            cgroup_pids.update(re.findall(r"[Kk]ill(?:ed)? process (\d+)", line))
        if match := _KILLED.search(line):
            used_kib = sum(int(match[part] or 0) for part in ("anon", "file", "shmem"))
            found.append(
                Kill(
                    pid=int(match["pid"]), name=match["name"], used_bytes=used_kib << 10,
                    in_cgroup=match["pid"] in cgroup_pids,
                )
            )  # fmt: skip
            cgroup_pids.discard(match["pid"])
    return tuple(found)


def choose(found: tuple[Kill, ...], process: ProcessInfo, *, in_container: bool) -> Kill | None:
    """Return the record of this process, the latest one; in a container of one with its name. Pure."""
    fits = [kill for kill in found if kill.name == process.name and (in_container or kill.pid == process.pid)]
    return fits[-1] if fits else None


def words(kill: Kill, *, total_bytes: int, limit_bytes: int | None) -> str:
    """Return a record in words; `total_bytes` is the machine's memory, `limit_bytes` the cgroup's, None for none. Pure."""
    used = f"kernel: {kill.name} used {_gb(kill.used_bytes)}"
    if kill.in_cgroup:
        limit = f" of the {_gb(limit_bytes)} GB that its cgroup may use" if limit_bytes else " GB"
        return f"it reached its memory limit ({used}{limit})"
    return f"the host ran out of memory ({used} of {_gb(total_bytes)} GB)"


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f}"


class Watch:
    """Looks at the kernel's log and counters from now on; `why` tells of a process that was ended by SIGKILL."""

    def __init__(self) -> None:
        self._before = _count_of_host()
        self._sizes = {path: _size(path) for path in _LOGS}
        self._kmsg = _open_kmsg()
        self._text = ""

    def why(self, process: ProcessInfo | None, cgroup: Cgroup) -> str:
        """Return why the kernel killed a process, "" where nothing says that it was for want of memory."""
        if process is not None:
            kill = choose(kills(self._log()), process, in_container=_in_container())
            if kill is not None:
                return words(kill, total_bytes=_total_bytes(), limit_bytes=cgroup.limit_bytes)
        if cgroup.has_killed():
            limit = f" of {_gb(cgroup.limit_bytes)} GB" if cgroup.limit_bytes else ""
            return f"it reached its memory limit{limit} (its cgroup has counted a kill)"
        return HOST_WIDE if _count_of_host() > self._before else ""

    def _log(self) -> str:
        """Return what the kernel has logged since the beginning, as far as this user may read it."""
        if self._kmsg >= 0:
            self._text = (self._text + _read_kmsg(self._kmsg))[-_LOG_BYTES:]
            return self._text
        return "\n".join(_read_from(path, size) for path, size in self._sizes.items())

    def close(self) -> None:
        """Let go of the kernel's log."""
        if self._kmsg >= 0:
            os.close(self._kmsg)
            self._kmsg = -1


HOST_WIDE = "the host ran out of memory and its kernel ended the process"


class Cgroup:
    """The memory cgroup of a process as it was when this was made: the process itself may be gone later."""

    def __init__(self, pid: int, root: Path = Path("/sys/fs/cgroup")) -> None:
        self._events, self._limits = _cgroup_files(_text_of(Path(f"/proc/{pid}/cgroup")), root)
        self._before = self._count()

    @property
    def limit_bytes(self) -> int | None:
        """The memory that it may use at most: the lowest limit of it and all above it, None for none."""
        found = [int(text) for path in self._limits if (text := _text_of(path).strip()).isdigit()]
        return min((limit for limit in found if limit < _UNLIMITED), default=None)

    def has_killed(self) -> bool:
        """Whether the kernel has killed a process in it since."""
        return self._count() > self._before

    def _count(self) -> int:
        return _counted(_text_of(self._events)) if self._events is not None else 0


def _cgroup_files(table: str, root: Path) -> tuple[Path | None, tuple[Path, ...]]:
    """Return the file that counts kills, and those with the limits from the cgroup upwards; by /proc/PID/cgroup."""
    for line in table.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            folder, events, limit = root / "memory", "memory.oom_control", "memory.limit_in_bytes"
        elif not controllers and not (root / "memory").exists():
            folder, events, limit = root, "memory.events", "memory.max"
        else:
            continue
        own = folder / path.strip("/")
        if not (own / events).exists():
            own = folder  # in a container the path may be the machine's, and what is mounted the container's own
        above = [own, *(up for up in own.parents if up == folder or folder in up.parents)]
        return own / events, tuple(up / limit for up in above)
    return None, ()


def _counted(text: str) -> int:
    """Return the number after `oom_kill` in a table of counters."""
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))


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
        return fd  # as it should be: nothing new
    except OSError:
        return -1  # not ours to read, or not there
    return fd


def _read_kmsg(fd: int) -> str:
    return records(lambda: os.read(fd, 8192))


def records(read: Callable[[], bytes]) -> str:
    """Return the kernel's own messages among the records that `read` gives, one a call (kmsg: priority,...;text)."""
    found = []
    for _ in range(_RECORDS):
        try:
            head, _, text = read().decode(errors="replace").partition(";")
        except BrokenPipeError:
            continue  # overwritten before it was read: the next one is there
        except OSError:
            break  # no more
        priority = head.partition(",")[0]
        if not head:
            break
        if priority.isdigit() and int(priority) < 8:  # facility 0: not what a program has written into the log
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
