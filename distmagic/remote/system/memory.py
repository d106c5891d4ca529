"""Whether the kernel killed a process because memory ran out, and whose memory: the machine's or a
cgroup's.

Its parent only sees a SIGKILL. The kernel counts its kills, for each memory cgroup and for the
machine. A counter that has increased since the start of the process proves the reason. The kernel's
log also names the process, but on most systems users may not read it.
"""

from __future__ import annotations

from pathlib import Path

REACHED = "it reached its memory limit"
HOST_WIDE = "the host ran out of memory and its kernel ended the process"
# Bytes; cgroups of version 1 have a larger number if there is no limit.
_UNLIMITED = 1 << 60


class Watch:
    """Explains a SIGKILL by the kernel's counters that have increased since this object was
    made.
    """

    def __init__(self) -> None:
        self._before = _count_of_host()

    def why(self, cgroup: Cgroup) -> str:
        """Return why the kernel killed a process of a cgroup; "" if nothing shows that memory ran
        out.
        """
        if cgroup.has_killed():
            limit = cgroup.limit_bytes
            of_limit = f" of {limit / 1e9:.1f} GB" if limit else ""
            return f"{REACHED}{of_limit} (its cgroup has counted a kill)"
        return HOST_WIDE if _count_of_host() > self._before else ""


class Cgroup:
    """The memory cgroup of a process.

    It is found while the process lives; its files stay readable after the process's end.
    """

    def __init__(self, pid: int, root: Path = Path("/sys/fs/cgroup")) -> None:
        table = text_of(Path(f"/proc/{pid}/cgroup"))
        self._events, self._limits = _cgroup_files(table, root)
        self._before = self._count()

    @property
    def limit_bytes(self) -> int | None:
        """The memory limit of the cgroup: the lowest of its own and its parents', None for none."""
        limits = []
        for path in self._limits:
            text = text_of(path).strip()
            if text.isdigit() and int(text) < _UNLIMITED:  # otherwise "max"
                limits.append(int(text))
        return min(limits, default=None)

    def has_killed(self) -> bool:
        """Whether the kernel has killed a process of the cgroup since this object was made."""
        return self._count() > self._before

    def _count(self) -> int:
        return _counted(text_of(self._events)) if self._events is not None else 0


def _cgroup_files(table: str, root: Path) -> tuple[Path | None, tuple[Path, ...]]:
    """Return the file that counts kills, and the files with the limits of the cgroup and its
    parents.

    `table` is the text of /proc/PID/cgroup. Return (None, ()) if it names no memory cgroup.
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
        limits = [
            place / limit
            for place in (own, *own.parents)
            if place.is_relative_to(folder)
        ]
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
    return _counted(text_of(Path("/proc/vmstat")))


def text_of(path: Path) -> str:
    """Return the text of a kernel file, "" if it is unreadable."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
