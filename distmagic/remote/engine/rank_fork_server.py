"""Forks the ranks of a warm engine, in a process that the engine forks before torchrun starts and
that has one thread.

The engine itself gets threads, sockets and signal handlers of torchrun, so ranks can't be forked
from it.

    engine            --`fork_rank`: variables, stdout and stderr-->  fork server
    fork server       --fork-->                                       middle process
    middle process    --fork-->                                       rank; the middle process exits
    engine            --adopts the rank, as the nearest subreaper--
    fork server       --the rank's pid-->                             engine

So the rank is a child of the engine. torchrun waits for it, signals it and reads its exit code as
if `SubprocessHandler._popen` had started it, which `replace_popen` replaces.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from distmagic.remote.engine import forking, process_title
from distmagic.remote.rank import sources
from distmagic.remote.system import processes

_LENGTH = struct.Struct("!I")
_ANSWER = struct.Struct("!I")  # a pid, 0 for a failure
_PAUSE_S = 0.01


class RankForkServer:
    """The engine's side: the connection to the fork server, which ends when the engine does."""

    def __init__(self) -> None:
        self._conn, far = socket.socketpair()
        # A socket object would close it when the child unwinds its stack.
        number = far.detach()
        forking.fork(partial(_serve, number, os.getpid()))
        os.close(number)

    def fork_rank(self, env: dict[str, str], out: int, err: int) -> int:
        """Return the pid of a new child of this process: a rank with these variables, stdout and
        stderr.

        Raises OSError if the host can't fork because it lacks processes or memory.
        """
        data = json.dumps(env).encode()
        processes.become_subreaper(yes=True)
        try:
            socket.send_fds(self._conn, [_LENGTH.pack(len(data))], [out, err])
            self._conn.sendall(data)
            (pid,) = _ANSWER.unpack(_read(self._conn, _ANSWER.size))
        finally:
            # The agent adopts orphans of ranks, not the engine.
            processes.become_subreaper(yes=False)
        if not pid:
            raise OSError(
                errno.EAGAIN,
                "this host can't start another process for a rank: it lacks memory, or this user may have no more",
            )
        return int(pid)

    def replace_popen(self, handler: Any) -> None:
        """Make torchrun's `SubprocessHandler` fork its ranks.

        Other commands are started as before.
        """
        command = processes.command("worker")
        start = handler._popen  # noqa: SLF001

        def popen(self_: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
            if tuple(args) != command:
                return start(self_, args, env)  # for example, with numactl in front
            out = self_._stdout.fileno() if self_._stdout else 1  # noqa: SLF001
            err = self_._stderr.fileno() if self_._stderr else 2  # noqa: SLF001
            return ForkedProcess(self.fork_rank(env, out, err))

        handler._popen = popen  # noqa: SLF001


@dataclass
class ForkedProcess:
    """A forked child, with the methods of `subprocess.Popen` that torchrun uses."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, minus the signal for one; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises `subprocess.TimeoutExpired`."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_PAUSE_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


# ---- in the fork server


def _serve(number: int, engine_pid: int) -> None:
    processes.die_with_parent(engine_pid)
    forking.close_descriptors({number, *forking.inherited.descriptors})
    conn = socket.socket(fileno=number)
    while True:
        head, fds, _, _ = socket.recv_fds(conn, _LENGTH.size, 2)
        if not head:
            os._exit(0)
        head += _read(conn, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        env = json.loads(_read(conn, length))
        pid = _fork_rank(env, fds)
        for fd in fds:
            os.close(fd)
        conn.sendall(_ANSWER.pack(pid))


def _read(conn: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = conn.recv(size - len(data))
        if not more:
            raise ConnectionError("the other side of the rank fork server is gone")
        data += more
    return data


def _fork_rank(env: dict[str, str], fds: list[int]) -> int:
    """Fork the middle process, which forks the rank and exits.

    Return the rank's pid, 0 if a fork fails.
    """
    pid_reading = pid_writing = go_reading = go_writing = -1
    answer = b""
    with suppress(OSError):
        pid_reading, pid_writing = os.pipe()
        go_reading, go_writing = os.pipe()
        middle = os.fork()
        if middle == 0:
            # The middle process forks the rank, reports its pid, and exits.
            unused = (pid_reading, pid_writing, go_writing)
            with suppress(OSError):
                rank = forking.fork(partial(_be_rank, env, fds, go_reading, unused))
                os.write(pid_writing, _ANSWER.pack(rank))
            os._exit(0)
        # With this end closed, the read below gets end of file if the middle process dies before it
        # has written, for example when memory runs out.
        os.close(pid_writing)
        pid_writing = -1
        os.waitpid(middle, 0)
        answer = os.read(pid_reading, _ANSWER.size)
    pid = int(_ANSWER.unpack(answer)[0]) if len(answer) == _ANSWER.size else 0
    if pid:
        os.write(go_writing, b"\n")
    for fd in (pid_reading, pid_writing, go_reading, go_writing):
        if fd >= 0:
            os.close(fd)
    return pid


def _be_rank(
    env: dict[str, str], fds: list[int], go: int, unused: tuple[int, ...]
) -> None:
    for fd in unused:
        os.close(fd)
    # The fork server writes to `go` when the middle process has exited. Only from then on the
    # engine is the parent; the worker asks the kernel to be killed with its parent, which must not
    # be the middle process.
    if not os.read(go, 1):
        # The fork server does not know this process: the middle one died before reporting the pid.
        os._exit(1)
    out, err = fds
    forking.reset_process(env, out, err)
    if _needs_exec(env):
        # Variables set by imports of the template are not in a new process.
        own = dict(env)
        for name, value in forking.inherited.variables.items():
            if own.get(name) == value:
                del own[name]
                if name in forking.inherited.before:
                    own[name] = forking.inherited.before[name]
        os.execve(sys.executable, processes.command("worker"), own)  # noqa: S606
    process_title.show("worker", env[processes.MARK])
    sys.argv[:] = [sys.path[0], "worker"]
    sys.orig_argv[:] = processes.command("worker")
    forking.reseed()
    forking.mend_rank(env)
    from distmagic.remote.rank import worker

    forking.exit_like_python(partial(worker.main, []))


def _needs_exec(env: dict[str, str]) -> bool:
    """Whether the rank must be started by exec after all.

    That is so if CUDA was initialized before the fork, or if modules of the user have the name of a
    loaded package and would hide it. It is also so if the program sets variables that a loaded
    package may read on import.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda._is_in_bad_fork():  # noqa: SLF001
        return True
    loaded = forking.preloaded()
    from_agent = json.loads(env["DISTMAGIC_WORKER"])
    folders = sources.import_paths(from_agent)
    asked_for = ("torch", *forking.inherited.asked_for)
    return sources.needs_new(Path(from_agent["code"]), asked_for) or any(
        not loaded.isdisjoint(_top_level_names(folder)) for folder in folders
    )


def _top_level_names(folder: str) -> set[str]:
    """Return the names of modules and packages that can be imported from a folder; none if it is
    unreadable.
    """
    names = set()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((".py", ".so")):
                names.add(entry.name.partition(".")[0])
            elif os.path.isfile(os.path.join(entry.path, "__init__.py")):
                names.add(entry.name)
    return names
