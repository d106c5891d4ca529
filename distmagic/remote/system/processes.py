"""Processes of a job: the agent adopts every orphan, finds all that descend from it, and ends them. Linux.

A process is named by (pid, start time), so that a number that was given out again is never hit. Each process of a job
carries `DISTMAGIC_JOB` in its environment; `sweep` finds by that mark what a killed agent left behind.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

MARK = "DISTMAGIC_JOB"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """A process as /proc shows it. `state` is one letter of ps(1); `exit_status` is for waitpid's macros, 0 if alive.

    `started` is in clock ticks since the machine started.
    """

    pid: int
    parent: int
    started: int
    state: str
    name: str
    exit_status: int


def become_subreaper(*, yes: bool = True) -> None:
    """Make this process the parent of every orphan among its descendants (prctl(2), PR_SET_CHILD_SUBREAPER), or not."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(yes))


def die_with_parent() -> None:
    """Have the kernel end this process as soon as its parent ends."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # the parent ended before the kernel knew of our wish


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def read(pid: int) -> ProcessInfo | None:
    """Return the process of this number, None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:  # gone, or somebody else's where /proc hides those
        return None
    name = text[text.index("(") + 1 : text.rindex(")")]
    words = text[text.rindex(")") + 2 :].split()  # proc(5): words[0] is field 3
    return ProcessInfo(
        pid=pid, parent=int(words[1]), started=int(words[19]), state=words[0], name=name, exit_status=int(words[49])
    )


def everything() -> tuple[ProcessInfo, ...]:
    """Return every process of this host's process namespace."""
    found = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return tuple(process for process in found if process is not None)


def descendants(root: int, table: Iterable[ProcessInfo] | None = None) -> tuple[ProcessInfo, ...]:
    """Return all living processes below `root`, parents first; zombies are left out."""
    children: dict[int, list[ProcessInfo]] = {}
    for process in everything() if table is None else table:
        children.setdefault(process.parent, []).append(process)
    found, queue = [], [root]
    while queue:
        for child in children.get(queue.pop(0), ()):
            queue.append(child.pid)
            if child.state not in "ZX":
                found.append(child)
    return tuple(found)


def send(process: ProcessInfo, number: int) -> None:
    """Send a signal to exactly this process; nothing happens if it is gone."""
    now = read(process.pid)
    if now is not None and now.started == process.started:
        try:
            os.kill(process.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # gone, or it has become somebody else's (setuid)


def wait_gone(process: ProcessInfo, timeout_s: float) -> bool:
    """Return as soon as this process has ended, whoever's child it is; False if it has not within the time."""
    end = time.monotonic() + timeout_s
    pidfd = open_pidfd(process.pid)
    try:
        while (now := read(process.pid)) is not None and now.started == process.started and now.state not in "ZX":
            left = end - time.monotonic()
            if left <= 0:
                return False
            select.select([pidfd] if pidfd >= 0 else [], [], [], left if pidfd >= 0 else 0.02)
    finally:
        if pidfd >= 0:
            os.close(pidfd)
    return True


def open_pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when this process ends; -1 where there is none."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # gone; or a kernel, or a Python, from before 5.3: the clock notices the end then
        return -1


def reap() -> dict[int, int]:
    """Collect every child that has ended: {pid: status for waitpid's macros}."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def marked(job: str) -> tuple[ProcessInfo, ...]:
    """Return the living processes of this user that carry the job's mark, but for this process and its parents."""
    needle = f"{MARK}={job}\0".encode()
    own = _ancestors()
    return tuple(p for p in everything() if p.pid not in own and p.state not in "ZX" and needle in _environ(p.pid))


def has_role(process: ProcessInfo, role: str) -> bool:
    """Whether a process was started as this role of the bundle, or shows it (see process_title.py)."""
    try:
        with open(f"/proc/{process.pid}/cmdline", "rb") as file:
            return role.encode() in file.read().split(b"\0")
    except OSError:
        return False  # gone meanwhile


def _ancestors() -> set[int]:
    found, pid = set(), os.getpid()
    while pid > 1:
        found.add(pid)
        process = read(pid)
        pid = process.parent if process else 0
    return found


def _environ(pid: int) -> bytes:
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return b""
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read() + b"\0"
    except OSError:
        return b""  # gone meanwhile, or not ours to read


def sweep(job: str, timeout_s: float = 5.0) -> tuple[ProcessInfo, ...]:
    """SIGKILL everything that carries the job's mark, again and again until nothing is left; return what is left."""
    end = time.monotonic() + timeout_s
    while left := marked(job):
        if time.monotonic() > end:
            return left
        for process in left:
            send(process, signal.SIGKILL)
        time.sleep(0.02)
    return ()
