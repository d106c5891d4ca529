"""Where a warm engine's ranks come from: a process forked from the engine before torchrun begins forks each of them.

The engine itself soon has threads, sockets and handlers of torchrun; the nursery has none. A rank becomes the
engine's child all the same: its parent in between ends at once, and the engine adopts it as a subreaper. So torchrun
waits for it, signals it and reads its exit code as if it had started it, in place of `SubprocessHandler._popen`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from functools import partial
from typing import Any

from distmagic.remote.engine import forking, process_title
from distmagic.remote.system import processes

_LENGTH = struct.Struct("!I")
_PAUSE_S = 0.01


class RankForkServer:
    """The engine's end of it."""

    def __init__(self) -> None:
        self._conn, far = socket.socketpair()
        number = far.detach()  # a child that unwinds must not close it
        forking.fork(partial(_serve, number))
        os.close(number)

    def fork_rank(self, env: dict[str, str], out: int, err: int) -> int:
        """Return the pid of a new child of this process: a rank with these variables and streams."""
        data = json.dumps(env).encode()
        processes.become_subreaper(yes=True)
        try:
            socket.send_fds(self._conn, [_LENGTH.pack(len(data))], [out, err])
            self._conn.sendall(data)
            (pid,) = _LENGTH.unpack(_read(self._conn, _LENGTH.size))
        finally:
            processes.become_subreaper(yes=False)  # orphans of ranks are the agent's
        return int(pid)

    def replace_popen(self, handler: Any) -> None:
        """Have torchrun's `SubprocessHandler` take its ranks from here; other commands are started as ever."""
        command = (sys.executable, "-u", sys.path[0], "worker")
        start = handler._popen  # noqa: SLF001

        def popen(self_: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
            if tuple(args) != command:
                return start(self_, args, env)  # bound to the cores of a NUMA node, say
            out, err = (file.fileno() if file else fd for file, fd in ((self_._stdout, 1), (self_._stderr, 2)))  # noqa: SLF001
            return ForkedProcess(command, self.fork_rank(env, out, err))

        handler._popen = popen  # noqa: SLF001


class ForkedProcess:
    """A child that was forked, with as much of `subprocess.Popen` as torchrun uses."""

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self.args, self.pid = args, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, minus the signal for one; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode = 0  # as Popen has it: somebody else has collected it
                return 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code as soon as there is one. Raises `subprocess.TimeoutExpired`."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_PAUSE_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


# ---- in the nursery


def _serve(number: int) -> None:
    processes.die_with_parent()
    forking.close_descriptors({number, *forking.inherited.descriptors})
    conn = socket.socket(fileno=number)
    while True:
        head, fds, _, _ = socket.recv_fds(conn, _LENGTH.size, 2)
        if not head:
            os._exit(0)
        head += _read(conn, _LENGTH.size - len(head)) if len(head) < _LENGTH.size else b""
        env = json.loads(_read(conn, *_LENGTH.unpack(head)))
        pid = _fork_rank(env, fds)
        for fd in fds:
            os.close(fd)
        conn.sendall(_LENGTH.pack(pid))


def _read(conn: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = conn.recv(size - len(data))
        if not more:
            raise ConnectionError("the other side of the nursery is gone")
        data += more
    return data


def _fork_rank(env: dict[str, str], fds: list[int]) -> int:
    """Fork a process that forks the rank and ends: an orphan goes to its nearest subreaper, the engine."""
    told, tell = os.pipe()
    adopted, let_go = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = forking.fork(partial(_be_rank, env, adopted, fds))
        os.write(tell, _LENGTH.pack(pid))
        os._exit(0)
    os.waitpid(middle, 0)
    (pid,) = _LENGTH.unpack(os.read(told, _LENGTH.size))
    os.write(let_go, b"\n")
    for fd in (told, tell, adopted, let_go):
        os.close(fd)
    return int(pid)


def _be_rank(env: dict[str, str], adopted: int, fds: list[int]) -> None:
    os.read(adopted, 1)  # only now is the engine the parent, with which a rank ends
    forking.settle(env, (os.open(os.devnull, os.O_RDONLY), *fds))  # type: ignore[arg-type]
    if _needs_exec(env):
        os.execve(sys.executable, [sys.executable, "-u", sys.path[0], "worker"], env)  # noqa: S606
    process_title.show("worker", env[processes.MARK])
    sys.argv[:] = [sys.path[0], "worker"]
    sys.orig_argv[:] = [sys.executable, "-u", *sys.argv]
    forking.reseed()
    from distmagic.remote.rank import worker

    forking.leave(partial(worker.main, []))


def _needs_exec(env: dict[str, str]) -> bool:
    """Whether only a fresh start will do: CUDA was touched before the fork, or the user's own modules would be hidden."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda._is_in_bad_fork():  # noqa: SLF001
        return True
    with zipfile.ZipFile(json.loads(env["DISTMAGIC_WORKER"])["code"]) as archive:
        names = [name.split("/") for name in archive.namelist() if name.startswith("modules/")]
    return bool({parts[1].removesuffix(".py") for parts in names} & forking.preloaded())
