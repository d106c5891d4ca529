"""The notebook's side of many hosts: `python -m tests.bench.many_notebook SOCKET HOSTS` prints one launch as JSON.

All of distmagic but SSH is at work. A process of its own, so that its threads, descriptors and memory are of this
launch alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from distmagic.connection.connections import Connections
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import Cancelled
from distmagic.payload.pack import pack_call
from distmagic.request.access import Access
from distmagic.request.hosts import Host
from distmagic.request.spec import JobSpec
from distmagic.session.session import Session
from distmagic.state.model import RunState
from distmagic.transports.asking import Asker
from tests.bench.crowd_notebook import SocketProcess
from tests.bench.many_server import CONVERSATION, LOG_IN


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """One launch: until a rank had begun on every host, and from an interrupt then until all were stopped.

    `cpu_s` is this process's until the ranks had begun, `threads` how many it had then, `grown_mb` by how much its
    memory had grown.
    """

    begun_s: float
    stopped_s: float
    cpu_s: float
    threads: int
    grown_mb: float


class SimulatedHost:
    """A transport to one of the server's hosts: a log-in, and a conversation for each process."""

    warnings: tuple[str, ...] = ()

    def __init__(self, path: str, number: int) -> None:
        self._path, self._number = path, number
        self._log_in = _dial(path, LOG_IN, number)
        assert self._log_in.recv(100) == b"welcome\n"

    def start(self, argv: tuple[str, ...]) -> SocketProcess:
        """Begin a conversation."""
        return SocketProcess(_dial(self._path, CONVERSATION, self._number))

    def close(self) -> None:
        """Hang up."""
        self._log_in.close()


def _dial(path: str, kind: str, number: int) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.connect(path)
    made.sendall(f"{kind} {number}\n".encode())
    return made


class Interrupting:
    """A screen that interrupts when a rank runs on each of so many hosts."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self.at_s = self.cpu_s = 0.0
        self.threads = 0
        self.memory_mb = 0.0

    def show(self, state: RunState) -> None:
        """Note when all ranks have begun, and interrupt."""
        if self.at_s or len(state.workers) < self._hosts:
            return
        self.at_s, self.cpu_s = time.monotonic(), time.process_time()
        self.threads, self.memory_mb = threading.active_count(), _memory_mb()
        os.kill(os.getpid(), signal.SIGINT)

    def finish(self, state: RunState) -> None:
        """Show nothing."""

    def can_type(self) -> bool:
        """Say that nobody can."""
        return False

    def requests(self) -> tuple[str, ...]:
        """Return nothing."""
        return ()


def launch(path: str, hosts: int) -> Took:
    """Begin a job on all hosts of the server at `path`, and stop it."""

    def connect(host: Host, access: Access, asker: Asker) -> SimulatedHost:
        return SimulatedHost(path, int(host.name.partition("-")[2]))

    session = Session(Connections(connect))
    named = tuple(Host(name=f"host-{number}") for number in range(hosts))
    payload = pack_call(int, limit_bytes=1 << 20, labels={})
    screen = Interrupting(hosts)
    memory_mb = _memory_mb()
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    with closing(session), closing(NotebookAsker(can_ask=False)) as asker:
        try:
            session.launch(
                session.reach(named, Access(cold=True), asker),
                JobSpec(nproc_per_node=1),
                payload,
                screen,
            )
        except Cancelled:
            ended_s = time.monotonic()
    return Took(
        begun_s=screen.at_s - began_s, stopped_s=ended_s - screen.at_s, cpu_s=screen.cpu_s - began_cpu_s,
        threads=screen.threads, grown_mb=screen.memory_mb - memory_mb,
    )  # fmt: skip


def _memory_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return (
        next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    )


if __name__ == "__main__":
    print(json.dumps(asdict(launch(sys.argv[1], int(sys.argv[2])))))
