"""Starts agents, by exec or by a fork of the template (the warm process), and follows running
agents.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distmagic.remote.contact import relay, template_client
from distmagic.remote.records import listing, places, work_dirs
from distmagic.remote.system import logout, processes
from distmagic.remote.system.device_claims import DeviceClaims
from distmagic.remote.wire import protocol

if TYPE_CHECKING:
    from distmagic.remote.contact import Conversation

_AGENT_LOG = "agent.log"
_GONE_S = 10.0  # time for its process to end; its socket is already closed


@dataclass(frozen=True)
class Agents:
    """Starts and follows agents for one contact.

    The umask is the user's, for the ranks; an agent takes over the devices.
    """

    _notebook: Conversation
    _umask: int
    _devices: DeviceClaims

    def start(self, request: protocol.StartNode) -> None:
        """Prepare the job's working directory, start an agent, and forward bytes until it ends."""
        cwd = os.path.expanduser(request.cwd)
        if cwd and not os.path.isdir(cwd):
            raise FileNotFoundError(
                f"the directory {request.cwd} (--cwd) does not exist"
            )
        places.log_limit_bytes(request.env)
        if request.work is None:
            self._start_agent(replace(request, cwd=cwd))
            return
        ready = work_dirs.prepare(
            request.work, request.job, request.node_rank, request.terms.owner
        )
        work = replace(request.work, path=str(ready.path))
        try:
            self._notebook.say(
                protocol.WorkDirReady(path=work.path, notice=ready.notice)
            )
            self._start_agent(
                replace(
                    request, cwd=cwd or os.path.join(work.path, work.inside), work=work
                )
            )
        finally:
            # No agent was started.
            if not listing.is_running(request.job, request.node_rank):
                work_dirs.leave(ready.path, request.job, request.node_rank)

    def _start_agent(self, request: protocol.StartNode) -> None:
        """Start an agent, and forward bytes until it ends."""
        folder = places.job_dir(request.job, request.node_rank)
        try:
            prefix = logout.survivor_prefix(must=request.terms.survives_logout)
        except PermissionError as error:
            self._notebook.say(protocol.Refused(what="detach_job", error=str(error)))
            return
        for each in (folder.parent.parent, folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=each is not folder)
        listing.remember(folder, request)
        run_dir = places.make_run_dir(request.job, request.node_rank)
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, run_dir, ignore_errors=True)
            with places.reader_listener(run_dir) as listener:
                # Connect before the agent runs: this connection must be its first, however many
                # others come during its start.
                conn = undo.enter_context(relay.connect(run_dir / places.READERS))
                wait = self._spawn(request, listener, folder, prefix)
            undo.pop_all()
        # The agent has them, and they stay reserved as long as it runs.
        self._devices.release()
        follow = protocol.FollowJob(job=request.job, node_rank=request.node_rank)
        with _connected_again():
            has_spoken = relay.relay(self._notebook, conn, follow)
        wait()
        if not has_spoken and not processes.marked(request.job):
            # An agent that has not started removes nothing itself.
            shutil.rmtree(run_dir, ignore_errors=True)
        self._notebook.say(protocol.AgentGone(error=_last_line(folder / _AGENT_LOG)))

    def _spawn(
        self,
        request: protocol.StartNode,
        listener: socket.socket,
        folder: Path,
        prefix: tuple[str, ...],
    ) -> Callable[[], object]:
        """Start the agent, by fork or by exec; return a function that waits for its end.

        The agent inherits its listening socket, and the descriptors that reserve its devices.
        """
        log_bytes = str(places.log_limit_bytes(request.env))
        marks = {processes.MARK: request.job, places.LOG_BYTES_NAME: log_bytes}
        env = {**os.environ, **marks}
        devices = self._devices.descriptors
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        log = os.open(folder / _AGENT_LOG, flags, 0o600)
        try:
            if request.warm is not None:
                self._notebook.owner = request.warm.owner
                agent = template_client.fork_agent(
                    request, listener, log, devices, env, self._umask, prefix
                )
                if agent is not None:
                    _note(agent.pid, request)
                    return partial(processes.wait_gone, agent, _GONE_S)
            # In its own session, with its `StartNode` on stdin, so that no secret is in argv.
            inherited = (listener.fileno(), *devices)
            child = subprocess.Popen(
                [*prefix, *processes.command("agent"), *map(str, inherited)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=env,
                pass_fds=inherited,
                start_new_session=True,
                umask=self._umask,
            )
            _note(child.pid, request)
            assert child.stdin is not None
            child.stdin.write(protocol.encode(request))
            child.stdin.close()
            return child.wait
        finally:
            # An agent may run by now, whatever errors the home directory causes.
            with suppress(OSError):
                os.close(log)

    def follow(self, request: protocol.FollowJob) -> None:
        """Forward bytes between the notebook and a node's agent.

        If the agent has ended, send its journal.

        Raises ValueError for an agent of another protocol version, and FileNotFoundError if this
        host has no files of the job. Raises TimeoutError for an agent that accepts no connection.
        Exits if the agent runs but its connection has ended: the notebook then connects again.
        """
        was_followed = _connected_again() if request.after else nullcontext()
        with was_followed:
            listing.check_protocol(request.job, request.node_rank)
            folder = places.job_dir(request.job, request.node_rank)
            run_dir = places.run_dir(request.job, request.node_rank)
            try:
                places.check_run_dir(run_dir)
                has_spoken = relay.relay(
                    self._notebook, relay.connect(run_dir / places.READERS), request
                )
            except BlockingIOError:
                text = f"the agent of job {request.job} takes no connection: its process is stopped, or waits for a disk"
                raise TimeoutError(text) from None
            except (FileNotFoundError, ConnectionError):
                has_spoken = False
            if not has_spoken:
                # A cleaner of /tmp has removed its socket, and the agent is about to make another
                # one: the notebook connects again.
                if listing.is_running(request.job, request.node_rank):
                    sys.exit(0)
                if not folder.exists():
                    text = f"it has no files of job {request.job}: its part never started, or they were removed"
                    raise FileNotFoundError(text)
                # The agent has ended meanwhile; its journal has the reason.
                relay.replay(self._notebook, request)
            self._notebook.say(
                protocol.AgentGone(error=_last_line(folder / _AGENT_LOG))
            )


@contextmanager
def _connected_again() -> Iterator[None]:
    """Make the notebook connect again if the system refuses something while an agent runs.

    For example, a home's file server that does not answer may recover: a refusal would end a
    healthy run.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        sys.exit(str(error))


def _note(pid: int, request: protocol.StartNode) -> None:
    """Record the agent's process before the agent itself can, so that an agent that dies early is
    found, too.
    """
    with suppress(OSError):
        run_dir = places.run_dir(request.job, request.node_rank)
        processes.note(pid, run_dir / places.PID)


def _last_line(path: Path) -> str:
    """Return the last non-blank line of a log, "" for none; only the start of a long one."""
    try:
        text = path.read_bytes()[-8192:].decode(errors="replace")
    except OSError:
        return ""
    return text.strip().rpartition("\n")[2].strip()[:500]
