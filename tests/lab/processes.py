"""The processes of a host, seen from outside through /proc."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distmagic.remote.contact.boot import BOOTSTRAP

_SERVER_NAMES = ("sshd", "sshd-session", "sshd-auth")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcess:
    """A process on a host. `pid` and `ppid` are the host's own numbers, `outer_pid` is this machine's.

    `ppid` is 0 where the parent is outside: what `LabHost.exec` started.
    """

    pid: int
    ppid: int
    outer_pid: int
    name: str
    cmdline: tuple[str, ...]
    environ: dict[str, str]

    @property
    def is_of_distmagic(self) -> bool:
        """Whether it carries a job's mark, or speaks of distmagic on its command line.

        A conversation's own process, which is no job's and ends with its connection, does not count.
        """
        words = [word for word in self.cmdline[1:] if word != BOOTSTRAP]
        return "DISTMAGIC_JOB" in self.environ or any(
            "distmagic" in word for word in words
        )


def of_host(first: int) -> tuple[HostProcess, ...]:
    """Return the processes in the PID namespace of process `first`, without it, the SSH server's own, and zombies."""
    statuses = {pid: status for pid in outer_pids(first) if (status := _status(pid))}
    inner = {pid: int(status["NSpid"].split()[-1]) for pid, status in statuses.items()}
    return tuple(
        HostProcess(
            pid=inner[pid],
            ppid=inner.get(int(status["PPid"]), 0),
            outer_pid=pid,
            name=status["Name"],
            cmdline=tuple(_words(pid, "cmdline")),
            environ=dict(
                word.split("=", 1) for word in _words(pid, "environ") if "=" in word
            ),
        )
        for pid, status in statuses.items()
        if pid != first
        and status["State"][0] not in "ZX"
        and status["Name"] not in _SERVER_NAMES
    )


def outer_pids(first: int) -> Iterator[int]:
    """Yield this machine's numbers of all processes in the PID namespace of process `first`."""
    namespace = os.readlink(f"/proc/{first}/ns/pid")
    for name in os.listdir("/proc"):
        if name.isdigit() and _namespace(name) == namespace:
            yield int(name)


def only_child(pid: int) -> int:
    """Return the pid of the one child that this process has."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def signal_all(first: int, number: int) -> None:
    """Send a signal to every process in the PID namespace of process `first`."""
    for pid in outer_pids(first):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it ended by itself


def stop_all(first: int) -> bool:
    """Stop every process of the namespace that runs; return whether all had been stopped already."""
    running = [
        pid
        for pid in outer_pids(first)
        if (status := _status(pid)) and status["State"][0] not in "TtZX"
    ]
    for pid in running:
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            continue
    return not running


def _namespace(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""  # gone meanwhile


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {
        key: value.strip() for key, _, value in (line.partition(":") for line in lines)
    }


def _words(pid: int, file: str) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return text.rstrip("\0").split("\0") if text else []
