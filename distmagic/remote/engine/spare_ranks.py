"""Forks the ranks of a warm engine before torchrun starts; each waits until torchrun starts it.

torchrun gets threads, sockets and signal handlers, so ranks can't be forked from it later.

    engine        --fork, once per rank of this node-->                spare rank
    spare rank    --waits-->
    engine        --`start`: variables, stdout and stderr-->           spare rank, now a rank

So a rank is a child of the engine. torchrun waits for it, signals it and reads its exit code as if
`SubprocessHandler._popen` had started it, which `replace_popen` replaces. Ranks that torchrun
restarts are started by exec.
"""

from __future__ import annotations

import json
import os
import socket
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

_PAUSE_S = 0.01


class SpareRanks:
    """The engine's side: forked processes that wait to become ranks, and end when the engine
    does.
    """

    def __init__(self, count: int) -> None:
        needs_exec = _needs_exec(json.loads(os.environ["DISTMAGIC_WORKER"]))
        self._waiting: list[tuple[int, socket.socket]] = []
        for _ in range(count):
            conn, far = socket.socketpair()
            # A socket object would close it when the child unwinds its stack.
            number = far.detach()
            act = partial(_wait_as_spare, number, os.getpid(), needs_exec=needs_exec)
            # Without memory or processes for all, torchrun starts the others.
            with suppress(OSError):
                self._waiting.append((forking.fork(act), conn))
            os.close(number)

    def replace_popen(self, handler: Any) -> None:
        """Make torchrun's `SubprocessHandler` start the spare ranks first.

        Other commands, and ranks after the last spare one, are started as before. Raises OSError
        if the host can't start a process because it lacks processes or memory.
        """
        command = processes.command("worker")
        start = handler._popen  # noqa: SLF001

        def popen(self_: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
            if not self._waiting or tuple(args) != command:
                try:
                    # For example, with numactl in front.
                    return start(self_, args, _of_new_process(env))
                except BlockingIOError as error:
                    text = "this host can't start another process for a rank: it lacks memory, or this user may have no more"
                    raise OSError(error.errno, text) from None
            out = self_._stdout.fileno() if self_._stdout else 1  # noqa: SLF001
            err = self_._stderr.fileno() if self_._stderr else 2  # noqa: SLF001
            return self.start(env, out, err)

        handler._popen = popen  # noqa: SLF001

    def start(self, env: dict[str, str], out: int, err: int) -> ForkedProcess:
        """Make a rank of the next spare one, with these variables, stdout and stderr.

        A spare rank that was killed is returned like a rank that was.
        """
        pid, conn = self._waiting.pop(0)
        with conn, suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(conn, [b"\n"], [out, err])
            conn.sendall(json.dumps(env).encode())
        return ForkedProcess(pid)


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


# ---- in the forked process


def _wait_as_spare(number: int, engine_pid: int, *, needs_exec: bool) -> None:
    processes.die_with_parent(engine_pid)
    # From the start, because torchrun ends a rank by the number of its group.
    os.setsid()
    forking.close_descriptors({number, *forking.inherited.descriptors})
    with socket.socket(fileno=number) as conn:
        _, fds, _, _ = socket.recv_fds(conn, 1, 2)
        with conn.makefile("rb") as rest:
            data = rest.read()
    if not data:
        os._exit(1)  # the engine has ended
    _be_rank(json.loads(data), fds, needs_exec=needs_exec)


def _be_rank(env: dict[str, str], fds: list[int], *, needs_exec: bool) -> None:
    out, err = fds
    forking.reset_process(env, out, err)
    if needs_exec:
        own = _of_new_process(env)
        os.execve(sys.executable, processes.command("worker"), own)  # noqa: S606
    process_title.show("worker", env[processes.MARK])
    sys.argv[:] = [sys.path[0], "worker"]
    sys.orig_argv[:] = processes.command("worker")
    forking.reseed()
    forking.mend_rank(env)
    from distmagic.remote.rank import worker

    forking.exit_like_python(partial(worker.main, []))


def _of_new_process(env: dict[str, str]) -> dict[str, str]:
    """Return these variables as in a new process: without those that imports of the template
    set.
    """
    own = dict(env)
    for name, value in forking.inherited.variables.items():
        if own.get(name) == value:
            del own[name]
            if name in forking.inherited.before:
                own[name] = forking.inherited.before[name]
    return own


def _needs_exec(from_agent: dict[str, Any]) -> bool:
    """Whether ranks must be started by exec after all.

    That is so if CUDA was initialized before the fork, or if modules of the user have the name of a
    loaded package and would hide it. It is also so if the program sets variables that a loaded
    package may read on import.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda._is_in_bad_fork():  # noqa: SLF001
        return True
    loaded = forking.inherited.packages
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
