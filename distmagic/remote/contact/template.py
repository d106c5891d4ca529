"""The template: a process with torch loaded that never runs a job.

It forks the agents of its notebook's jobs.

It has one thread, because a fork copies only one. Standard input is its listening socket. It sends
a greeting over each connection and reads one request. It ends when its lease expires, or when it
was unused for long.

Theory of operation
===================

A template belongs to one owner, which is one notebook or script. Its key is a digest of everything
that a new process inherits (`_key` in template_client.py). A job is forked from the template with
its owner and key, or started by exec. A host keeps at most two templates of an owner.

    loading  it imports torch and the packages that ranks need. It listens, but does not answer yet
    ready    it serves one connection after the other, each with a greeting and one request
    trying   the same, while a child imports a package that jobs of its owner import (preloading.py)
    gone     its process has ended, and its directory is removed

loading -> ready: all is imported, there is one thread, CUDA is unused, and a forked process can
change its role and job in /proc. If any of these fails: loading -> gone.

ready -> trying: a package waits, and no job forked from this template runs. trying -> ready: the
child has ended. If it succeeded, the template imports the package itself as soon as no such job
runs; otherwise the package is refused, with a reason.

ready, trying -> gone, on whichever comes first:

    the lease was not renewed for `lease_s`       by RenewLease or ForkAgent, also while jobs run
    it was unused for `idle_s`                    a running job forked from it counts as use
    its socket was removed, and it has neither    no contact could find it
    a job nor a package
    a contact kills it (`_end`)                   its owner asks for that, a signal has stopped it,
                                                  or it is the least recently used of three
    it gets SIGTERM                               its allocation ends, or its host

A killed template leaves its directory behind; a later contact removes it (`sweep_dead` in
sweep.py).

To start a job, the contact connects and waits for the greeting. It sends `ForkAgent` with the
agent's socket, log and devices as descriptors, and receives the agent's pid. The agent forks
torchrun, which forks the ranks before it has threads.

Promised: a job starts even if no template fits, or one ends, hangs or is slow: by exec, at most 20
s later. A job outlives its template. A forked rank differs from a new process only in its hash seed
and its loaded modules (forking.py). A program that depends on these is started by exec. No code of
the user's own modules runs in a template. No other user can connect to it.

Not promised: that a template exists (a host short of memory may kill it), or that any package is
loaded. A package is imported once; a newer version of it changes the key.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from distmagic.remote.agent import main as agent_main
from distmagic.remote.contact import template_client
from distmagic.remote.engine import (
    engine,
    forking,
    huge_pages,
    preloading,
    process_title,
)
from distmagic.remote.engine.preloading import Preloading
from distmagic.remote.rank import sources
from distmagic.remote.records import environments, places
from distmagic.remote.system import socket_peer
from distmagic.remote.system.gc_pause import gc_paused
from distmagic.remote.wire import codec, protocol

# None of these starts a thread, uses a device or draws a random number on import (numpy is
# reseeded).
PRELOADED = (
    "torch", "torch.distributed.run", "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
    "torch.nn.parallel", "torch.utils.data", "cloudpickle", "encodings.idna", "distmagic.remote.rank.worker",
)  # fmt: skip
# What an agent receives in each job.
_FIRST_MESSAGES = (
    protocol.FollowJob,
    protocol.Worker,
    protocol.Progress,
    protocol.Ended,
    protocol.EngineEnded,
)
_REQUEST_S = 5.0  # time limit for a request to arrive completely
_REAP_S = 0.2
_TOUCH_S = 30.0
_MAX_BYTES = 4 << 20
_MOST_FDS = 253  # Linux's limit for one message


class TemplateServer:
    """Serves until its lease or idle time is over."""

    def __init__(
        self,
        listener: socket.socket,
        idle_s: float,
        lease_s: float,
        preload: Sequence[str],
        clock: Callable[[], float],
    ) -> None:
        self._listener = listener
        self._idle_s = idle_s
        self._lease_s = lease_s
        self._clock = clock
        self._began = self._used = self._renewed = clock()
        self._agents: set[int] = set()
        self._folder = Path(listener.getsockname()).parent
        self._preloading = Preloading()
        self._preloading.want(preload)
        # Steps that make forks faster; there are more after an import.
        self._faster_forks = huge_pages.collapse()
        self._has_slow_forks = True
        self._touch_at = self._began + _TOUCH_S
        self._pid = os.getpid()

    def run(self) -> None:
        """Answer requests until the lease or the idle time is over; running jobs pause the idle
        time.
        """
        while True:
            now = self._clock()
            if self._agents:
                self._used = now
            end = min(self._used + self._idle_s, self._renewed + self._lease_s)
            left_s = end - now
            if left_s <= 0:
                return
            pause_s = min(left_s, self._pause_s())
            ready, _, _ = select.select([self._listener], [], [], pause_s)
            if ready:
                conn, _ = self._listener.accept()
                with conn:
                    self._greet(conn)
            self._reap()
            self._work_if_idle()
            if self._clock() >= self._touch_at:
                self._touch_at = self._clock() + _TOUCH_S
                folder = self._folder
                is_found = (folder / places.TEMPLATE).exists()
                if not is_found and not self._agents and not self._preloading.has_work:
                    return  # a cleaner of /tmp removed it: no contact finds this template any more
                # Forked processes still need the first; a contact finds this template by the
                # others.
                places.touch(
                    (sys.path[0], folder, folder / places.TEMPLATE, folder / places.PID)
                )
                environments.touch_own()

    def _pause_s(self) -> float:
        """Return how long to wait for a connection before the next step of other work."""
        if self._has_slow_forks and not self._agents:
            return 0.0
        is_busy = self._agents or self._preloading.has_work
        return _REAP_S if is_busy else _TOUCH_S

    def _reap(self) -> None:
        for pid in list(self._agents):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._agents.remove(pid)

    def _work_if_idle(self) -> None:
        is_idle = not self._agents
        if is_idle and self._has_slow_forks:
            self._has_slow_forks = next(self._faster_forks, False)
        elif self._preloading.step(is_idle=is_idle):
            _remember(self._preloading.names)
            self._faster_forks = huge_pages.collapse()
            self._has_slow_forks = True

    def _greet(self, conn: socket.socket) -> None:
        now = self._clock()
        idle_s = 0.0 if self._agents else now - self._used
        refused = self._preloading.refused.items()
        hello = protocol.Template(
            pid=os.getpid(),
            age_s=now - self._began,
            idle_s=idle_s,
            packages=tuple(sorted(self._preloading.loaded)),
            refused=tuple(f"{name} ({why})" for name, why in refused),
        )
        conn.settimeout(_REQUEST_S)
        fds: list[int] = []
        try:
            socket_peer.check(conn)
            conn.sendall(protocol.encode(protocol.Templates(templates=(hello,))))
            _, fds, _, _ = socket.recv_fds(conn, 1, _MOST_FDS)
            with conn.makefile("rb") as rest:
                data = rest.read(_MAX_BYTES)
            request = protocol.decode(data)[1] if data else None
            if isinstance(request, protocol.RenewLease):
                self._renewed = self._clock()
            elif isinstance(request, protocol.ForkAgent) and len(fds) >= 2:
                pid = forking.fork(partial(_be_agent, request, *fds))
                self._agents.add(pid)
                # Answer despite errors of the home directory: otherwise the contact would start a
                # second agent.
                with suppress(OSError, ValueError, KeyError, zipfile.BadZipFile):
                    self._preloading.want(
                        sources.imports(places.blob(request.start.code))
                    )
                self._used = self._renewed = self._clock()
                forked = protocol.AgentForked(pid=pid)
                conn.sendall(protocol.encode(forked))
        except (OSError, ValueError):
            return  # it has disconnected, or sent an invalid message
        finally:
            if os.getpid() == self._pid:  # a child uses them
                for fd in fds:
                    os.close(fd)


def _be_agent(
    request: protocol.ForkAgent, listener: int, log: int, *devices: int
) -> None:
    forking.reset_process(request.env, log, log, keep=[listener, *devices])
    process_title.show("agent", request.start.job)
    agent_main.serve(request.start, socket.socket(fileno=listener), devices)


def main(_: list[str]) -> None:
    """Load torch, then serve.

    If that fails, it exits at once, and its notebook's jobs are started by exec.
    """
    listener = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    folder = Path(listener.getsockname()).parent
    pid = os.getpid()

    def end(*_: object) -> None:
        """Leave nothing behind, as after `run`; a child that tries an import has nothing."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.getpid() == pid:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + signal.SIGTERM)

    # Slurm ends an allocation by it, and so does a host that is switched off.
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)
    try:
        settings = json.loads(os.environ.pop(template_client.SETTINGS))
        # This variable is not for jobs; forked processes get their own.
        os.environ["DISTMAGIC_HOME"] = settings.pop("home")
        if _load():
            forking.run(
                lambda: TemplateServer(listener, **settings, clock=time.monotonic).run()
            )
    finally:
        if os.getpid() == pid:  # not in a child, which unwinds this stack too
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


class _Fresh:
    """The state of this process before any import."""

    variables: dict[str, str] = {}  # noqa: RUF012 - set once
    descriptors: frozenset[int] = frozenset()


def _load() -> bool:
    """Import everything that is preloaded; return whether this process may be forked afterwards."""
    _Fresh.variables = dict(os.environ)
    _Fresh.descriptors = frozenset(_descriptors())
    with gc_paused():
        for name in PRELOADED:
            importlib.import_module(name)
        engine.prepare()
        codec.prepare(*_FIRST_MESSAGES)
    _remember()
    if not process_title.can_show() or not preloading.has_one_thread():
        return False
    return not sys.modules["torch"].cuda.is_initialized()


def _remember(asked_for: Iterable[str] = ()) -> None:
    """Record what imports have changed so far."""
    descriptors = _descriptors() - _Fresh.descriptors
    forking.remember(_Fresh.variables, descriptors, asked_for)


def _descriptors() -> set[int]:
    return {
        int(fd)
        for fd in os.listdir("/proc/self/fd")
        # Excludes the descriptor of the listing itself.
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
