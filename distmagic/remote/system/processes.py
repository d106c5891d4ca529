"""Finds, waits for, signals and ends processes of a job, by /proc. Linux only.

A process is identified by its pid and its start time, so that no signal reaches a later process
with the same pid. Every process of a job has two marks: `DISTMAGIC_JOB` in its environment, and a
resource limit whose value encodes the job. By either mark `sweep` finds processes that a killed
agent has left, including daemons without variables.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from distmagic.remote.frozen import frozen
from distmagic.remote.system.memory import text_of

MARK = "DISTMAGIC_JOB"
# The limit of file locks, which Linux has not enforced since version 2.4; children inherit it,
# whatever else they change.
_RLIMIT_LOCKS = 10
_LIMIT_OF_LOCKS = b"Max file locks "  # a line of /proc/PID/limits
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.02  # between two looks where the kernel has no pidfds


@frozen
class ProcessInfo:
    """A process, read from /proc/PID/stat."""

    pid: int
    parent: int  # a pid
    started: int  # in clock ticks since boot
    state: str  # the letter of ps(1)
    name: str
    exit_status: int  # a status of waitpid(2), 0 for a process that has not ended

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, state {self.state})"

    @property
    def exit_code(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; None while it runs."""
        if self.state not in "ZX":
            return None
        return os.waitstatus_to_exitcode(self.exit_status)


def up_s() -> float:
    """Return the seconds since boot, including sleep. This clock can't be set.

    If a system has no such clock (macOS), it is another one that also counts sleep.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def age_s(process: ProcessInfo) -> float:
    """Return the age of a process, in seconds."""
    return up_s() - process.started / os.sysconf("SC_CLK_TCK")


def become_subreaper() -> None:
    """Make this process the parent of every orphan among its descendants.

    See PR_SET_CHILD_SUBREAPER in prctl(2).
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends.

    `parent` is the pid that the starter has passed. A new process can't determine it safely: its
    starter may have ended by then.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A launcher, such as `sys.executable` may be, can be in between.
    if os.getppid() != parent and parent not in _ancestors():
        # The parent ended before the call: the kernel sends nothing any more.
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def read(pid: int) -> ProcessInfo | None:
    """Return the process with this pid, None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:  # ended, or of another user and hidden in /proc
        return None
    # The name may contain spaces and parentheses.
    begin = text.index("(") + 1
    end = text.rindex(")")
    words = text[end + 2 :].split()  # words[0] is field 3 of proc_pid_stat(5)
    return ProcessInfo(
        pid=pid,
        parent=int(words[1]),
        started=int(words[19]),
        state=words[0],
        name=text[begin:end],
        exit_status=int(words[49]),
    )


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal; False if it has ended or is unreadable."""
    _, _, caught = text_of(Path(f"/proc/{pid}/status")).partition("SigCgt:")
    # A bit for each signal.
    return bool(caught) and bool(int(caught.split(None, 1)[0], 16) >> (number - 1) & 1)


def open_files(pid: int) -> set[str]:
    """Return the kernel's names of what a process has open, as far as they can be read."""
    folder, found = f"/proc/{pid}/fd", set()
    with suppress(OSError):  # it has ended, or belongs to another user
        for fd in os.listdir(folder):
            with suppress(OSError):  # closed meanwhile
                found.add(os.readlink(f"{folder}/{fd}"))
    return found


def everything() -> tuple[ProcessInfo, ...]:
    """Return all processes of this pid namespace."""
    found = [read(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    return tuple(process for process in found if process is not None)


def descendants(
    root: int, table: Iterable[ProcessInfo] | None = None
) -> tuple[ProcessInfo, ...]:
    """Return all descendants of the process `root`, parents first, without zombies.

    `table` defaults to `everything()`.
    """
    if table is None:
        table = everything()
    children: dict[int, list[ProcessInfo]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process)
    found = []
    queue = [root]
    while queue:
        for child in children.get(queue.pop(0), ()):
            queue.append(child.pid)
            if child.state not in "ZX":
                found.append(child)
    return tuple(found)


def send(process: ProcessInfo, number: int) -> None:
    """Send a signal to this process.

    Does nothing if it has ended, even if its pid is in use again.
    """
    now = read(process.pid)
    if now is not None and now.started == process.started:
        try:
            os.kill(process.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # it has just ended, or has changed its user (setuid)


def wait_gone(process: ProcessInfo, timeout_s: float) -> None:
    """Wait until this process has ended, at most `timeout_s`. It need not be a child."""
    end = time.monotonic() + timeout_s
    while (left_s := end - time.monotonic()) > 0:
        now = read(process.pid)
        if now is None or now.started != process.started or now.state in "ZX":
            return
        wait_for_end([process.pid], left_s)


def wait_for_end(pids: Iterable[int], timeout_s: float) -> None:
    """Wait until one of these processes ends, at most `timeout_s`.

    Those that were reaped before do not count. Without pidfds it returns after 0.02 s.
    """
    pidfds = [pidfd for pidfd in map(open_pidfd, pids) if pidfd >= 0]
    poll = select.poll()  # select(2) takes no descriptor above 1023
    try:
        for pidfd in pidfds:
            poll.register(pidfd)
        poll.poll(1000 * (timeout_s if pidfds else _PAUSE_S))
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def open_pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when this process ends; -1 if the system has
    none.
    """
    # It has ended; or this kernel (before 5.3) or this Python lacks the call.
    try:
        return os.pidfd_open(pid)
    except (
        OSError,
        AttributeError,
    ):
        return -1


def has_child() -> bool:
    """Whether this process has a child, which may be a zombie."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def reap() -> dict[int, int]:
    """Reap all children that have ended; return {pid: status of waitpid(2)}."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def marked(job: str, spared: Sequence[ProcessInfo] = ()) -> tuple[ProcessInfo, ...]:
    """Return this user's running processes that have the job's mark.

    Excluded are this process, its ancestors, and the `spared` processes with their descendants.
    """
    table = everything()
    others = _ancestors()
    for one in spared:
        others.add(one.pid)
        others |= {process.pid for process in descendants(one.pid, table)}
    return tuple(
        process
        for process in table
        if process.pid not in others
        and process.state not in "ZX"
        and is_marked(process, job)
    )


def mark_by_limit(job: str) -> None:
    """Give this process and its future children the job's mark that no change of variables
    removes.
    """
    with suppress(OSError, ValueError):  # the user's own limit is lower
        hard = resource.getrlimit(_RLIMIT_LOCKS)[1]
        resource.setrlimit(_RLIMIT_LOCKS, (_limit_of(job), hard))


def _limit_of(job: str) -> int:
    return int(hashlib.sha256(job.encode()).hexdigest()[:15], 16)


def note(pid: int, path: Path) -> None:
    """Record a process in a file, so that `noted` finds exactly this one later. Raises OSError."""
    process = read(pid)
    path.write_text(f"{pid} {process.started if process else 0}")


def noted(path: Path) -> ProcessInfo | None:
    """Return the process recorded in a file; None if it has ended, or none is recorded."""
    try:
        pid, started = map(int, path.read_text().split())
    except (OSError, ValueError):
        return None
    process = read(pid)
    return process if process is not None and process.started == started else None


def command(role: str) -> tuple[str, str, str, str]:
    """Return the command of a process of this bundle in a role. `is_agent` recognizes its words."""
    return sys.executable, "-u", sys.path[0], role


def is_agent(process: ProcessInfo) -> bool:
    """Whether a process is an agent, by its command line: as it was started, or as process_title.py
    rewrote it.
    """
    try:
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False  # ended meanwhile
    # python -u BUNDLE ROLE: a rank's program may have such a word among its own arguments.
    for option, bundle, word in zip(words, words[1:], words[2:], strict=False):
        is_bundle = b"/blobs/" in bundle or bundle == os.fsencode(sys.path[0])
        if option == b"-u" and is_bundle and word == b"agent":
            return True
    return False


def is_marked(process: ProcessInfo, job: str) -> bool:
    """Whether a process of this user has one of the job's two marks."""
    folder = Path(f"/proc/{process.pid}")
    try:
        if folder.stat().st_uid != os.getuid():
            return False
        variables = (folder / "environ").read_bytes() + b"\0"
        if f"{MARK}={job}\0".encode() in variables:
            return True
        _, _, limit = (folder / "limits").read_bytes().partition(_LIMIT_OF_LOCKS)
    except OSError:
        return False  # it has ended meanwhile, or is unreadable
    return limit.split()[:1] == [b"%d" % _limit_of(job)]


def _ancestors() -> set[int]:
    """Return the pids of this process and of all above it."""
    found = set()
    pid = os.getpid()
    while pid > 1:
        found.add(pid)
        process = read(pid)
        pid = process.parent if process else 0
    return found


def sweep(
    job: str, timeout_s: float = 5.0, spared: Sequence[ProcessInfo] = ()
) -> tuple[ProcessInfo, ...]:
    """Kill the processes that `marked` finds, until none is left.

    Return those that survive `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    while left := marked(job, spared):
        if time.monotonic() > end:
            return left
        for process in left:
            send(process, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    return ()
