"""The process behind one SSH channel: answers the notebook, starts agents, and carries bytes between the two.

It holds nothing: when its channel ends it ends, and agents go on under their lease.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

from distmagic.remote.contact import (
    blob_receiver,
    environment_sync,
    file_exchange,
    relay,
    template_client,
)
from distmagic.remote.records import (
    environments,
    expiry,
    listing,
    logs,
    places,
    work_dirs,
)
from distmagic.remote.system import facts, logout, processes
from distmagic.remote.wire import protocol
from distmagic.remote.wire.lines import Lines

_CHUNK = 1 << 20
_AGENT_LOG = "agent.log"
_GONE_S = 10.0  # its socket is closed already
_MOST_WORK_DIRS = 1000
_TOUCH_S = 30.0  # well within the time after which `expiry` takes a file for unused


class Contact:
    """The conversation on stdin and stdout. Standard output is ours alone: stray prints go to stderr."""

    def __init__(self, umask: int) -> None:
        self._umask = umask  # the user's own, for the ranks
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._lines = Lines()
        self._owner = ""
        self._receiver = blob_receiver.BlobReceiver(self)
        files = file_exchange.FileExchange(self, umask)
        self._handlers: dict[type, Callable[[Any], None]] = {
            protocol.GetFacts: self._send_facts_again,
            protocol.GetRoute: self._send_route,
            protocol.GetFreePort: self._send_free_port,
            protocol.CheckBlobs: self._receiver.check,
            protocol.OfferBlobs: self._receiver.offer,
            protocol.ServeBlobs: self._receiver.serve,
            protocol.ReceiveBlobs: self._receiver.take,
            protocol.GetBlob: self._send_blob,
            protocol.PruneBlobs: self._prune_blobs,
            protocol.StartNode: self._start_node,
            protocol.FollowJob: self._follow_job,
            protocol.GetFile: self._send_file,
            protocol.ListJobs: self._send_jobs,
            protocol.RemoveJob: self._remove_job,
            protocol.SweepJob: self._sweep_job,
            protocol.ListFiles: files.list,
            protocol.ReadFile: files.send,
            protocol.WriteFile: files.receive,
            protocol.ListWorkDirs: self._send_work_dirs,
            protocol.RemoveWorkDir: self._remove_work_dir,
            protocol.SyncEnvironment: environment_sync.EnvironmentSync(self).sync,
            protocol.TemplateRequest: self._ensure_template,
            protocol.RenewLease: self.renew_templates,
            protocol.ListTemplates: self._send_templates,
            protocol.EndTemplates: self._end_templates,
        }

    def run(self) -> None:
        """Send the facts, then answer until end of file."""
        self._send_facts()
        environments.touch_own()
        # After the facts, which the notebook waits for: on a slow disk it takes its time.
        _sweep_dead()
        with contextlib.suppress(OSError):
            expiry.tidy()
        line = self._line()
        while line is not None:
            _, request = protocol.decode(line)
            if (
                type(request) in self._handlers
            ):  # a request for an agent that ended meanwhile has no handler here
                self._answer(request)
            line = self._line()

    def _answer(self, request: protocol.Message) -> None:
        # Blobs are served to the next host while they arrive here. Any other request means that the delivery is over.
        if not isinstance(request, protocol.ServeBlobs | protocol.ReceiveBlobs):
            self._receiver.close()
        try:
            self._handlers[type(request)](request)
        except (OSError, ValueError) as error:
            self.say(protocol.Refused(what=protocol.name_of(request), error=str(error)))

    # ---- bytes

    def say(self, message: protocol.Message) -> None:
        """Tell the notebook something."""
        self.write(protocol.encode(message))

    def write(self, data: bytes) -> None:
        """Send bytes to the notebook."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._out, view) :]

    def take_rest(self) -> bytes:
        """Return what the notebook has sent after the last request."""
        return self._lines.take(_CHUNK)

    def _line(self) -> bytes | None:
        while (line := self._lines.line()) is None:
            # Other hosts may take minutes to receive a payload that this one has already. Nobody else keeps it meanwhile.
            while not select.select([0], [], [], _TOUCH_S)[0]:
                places.touch(self._receiver.awaited)
                environments.touch_own()
            data = os.read(0, 65536)
            if not data:
                return None
            self._lines.feed(data)
        return line

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes from the notebook."""
        while size:
            most = min(size, _CHUNK)
            data = self._lines.take(most) or os.read(0, most)
            if not data:
                sys.exit(0)  # the channel is gone in the middle of a file
            size -= len(data)
            yield data

    def wait(
        self, sock: socket.socket | IO[bytes], events: int, timeout_s: float
    ) -> None:
        """Wait for `events` (as of select.poll) of a socket or pipe, and end with the channel. Raises TimeoutError."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(sock, events)
        ready = dict(poll.poll(max(0.0, 1000 * timeout_s)))
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                sys.exit(0)  # the channel is gone
            self._lines.feed(data)
        elif not ready:
            raise TimeoutError(f"it said nothing for {timeout_s:.0f} s")

    # ---- this host

    def _send_facts(self) -> None:
        found = facts.gather()
        self.say(
            replace(found, running=listing.running(), write_error=places.write_error())
        )

    def _send_facts_again(self, _: protocol.GetFacts) -> None:
        """Send the facts once more: a port that was free need not be so any more. Refused where the bundle is gone."""
        os.stat(sys.path[0])
        self._send_facts()

    def _send_route(self, request: protocol.GetRoute) -> None:
        """Send the address from which this host dials a peer."""
        address, interface = facts.route(request.peer)
        self.say(protocol.Route(address=address, interface=interface))

    def _send_free_port(self, request: protocol.GetFreePort) -> None:
        """Send a port that is free now."""
        self.say(protocol.FreePort(port=facts.free_port(request.address)))

    # ---- jobs

    def _start_node(self, request: protocol.StartNode) -> None:
        """Make the job's working directory ready, start an agent, and carry bytes until it is gone."""
        self._receiver.awaited = ()  # from now on the agent keeps them
        cwd = os.path.expanduser(request.cwd)
        if cwd and not os.path.isdir(cwd):
            raise FileNotFoundError(
                f"the directory {request.cwd} (--cwd) does not exist"
            )
        places.log_limit_bytes(request.env)
        if request.work is None:
            self._start_agent(replace(request, cwd=cwd))
            return
        ready = work_dirs.prepare(request.work, request.job, request.node_rank)
        work = replace(request.work, path=str(ready.path))
        try:
            self.say(protocol.WorkDirReady(path=work.path, notice=ready.notice))
            self._start_agent(
                replace(
                    request, cwd=cwd or os.path.join(work.path, work.inside), work=work
                )
            )
        finally:
            if not listing.is_running(
                request.job, request.node_rank
            ):  # it has not come to an agent
                work_dirs.leave(ready.path, request.job, request.node_rank)

    def _start_agent(self, request: protocol.StartNode) -> None:
        """Start an agent, and carry bytes until it is gone."""
        folder = places.job_dir(request.job, request.node_rank)
        try:
            prefix = logout.survivor_prefix(must=request.terms.survives_logout)
        except PermissionError as error:
            self.say(protocol.Refused(what="detach_job", error=str(error)))
            return
        for each in (folder.parent.parent, folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=each is not folder)
        listing.remember(folder, request)
        run_dir = places.make_run_dir(request.job, request.node_rank)
        try:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(run_dir / places.READERS))
            (run_dir / places.READERS).chmod(0o600)
            listener.listen(places.BACKLOG)
            # Before there is an agent: its first connection is this one, however many others come while it starts.
            conn = relay.connect(run_dir / places.READERS)
            wait = self._spawn(request, listener, folder, prefix)
        except BaseException:
            shutil.rmtree(run_dir, ignore_errors=True)
            raise
        listener.close()
        follow = protocol.FollowJob(job=request.job, node_rank=request.node_rank)
        has_spoken = relay.relay(self, conn, follow)
        wait()
        if not has_spoken and not processes.marked(request.job):
            shutil.rmtree(
                run_dir, ignore_errors=True
            )  # an agent that has not begun removes nothing itself
        self.say(protocol.AgentGone(error=_last_line(folder / _AGENT_LOG)))

    def _spawn(
        self,
        request: protocol.StartNode,
        listener: socket.socket,
        folder: Path,
        prefix: tuple[str, ...],
    ) -> Callable[[], object]:
        """Start the agent, by fork or by exec; return a function that waits for its end."""
        with (folder / _AGENT_LOG).open("wb") as log:
            if request.warm is not None:
                self._owner = request.warm.owner
                agent = template_client.fork_agent(
                    request, listener, log.fileno(), self._umask, prefix
                )
                if agent is not None:
                    return partial(processes.wait_gone, agent, _GONE_S)
            return _exec(request, listener, log, prefix, self._umask)

    def _follow_job(self, request: protocol.FollowJob) -> None:
        """Carry bytes to and from an agent that runs, and speaks our protocol."""
        listing.check_protocol(request.job, request.node_rank)
        run_dir = places.run_dir(request.job, request.node_rank)
        try:
            places.check_run_dir(run_dir)
            has_spoken = relay.relay(
                self, relay.connect(run_dir / places.READERS), request
            )
        except BlockingIOError:
            text = f"the agent of job {request.job} takes no connection: its process is stopped, or waits for a disk"
            raise TimeoutError(text) from None
        except (FileNotFoundError, ConnectionError):
            has_spoken = False
        if not has_spoken:
            relay.replay(
                self, request
            )  # the agent has ended meanwhile; its journal says how
        folder = places.job_dir(request.job, request.node_rank)
        self.say(protocol.AgentGone(error=_last_line(folder / _AGENT_LOG)))

    def _send_file(self, request: protocol.GetFile) -> None:
        """Send a file of a job."""
        path = places.job_dir(request.job, request.node_rank) / request.name
        with contextlib.ExitStack() as stack:
            parts = []
            if (
                request.name == path.name and path.parent.is_dir()
            ):  # a name with / in it would lead elsewhere
                parts = logs.open_all(path, stack)
            if not parts:
                raise FileNotFoundError(
                    f"{request.name} of job {request.job} is not on this host (any more)"
                )
            skip = request.offset
            total = sum(size for _, size in parts)
            self.say(protocol.Data(size_bytes=max(0, total - skip)))
            for file, size in parts:
                begin = min(skip, size)
                self._send_part(file, begin, size)
                skip -= begin
        if path.suffix == ".result":
            expiry.mark_fetched(path)

    def _send_part(self, file: BinaryIO, at: int, end: int) -> None:
        file.seek(at)
        while at < end:
            data = file.read(min(end - at, _CHUNK))
            if not data:
                return
            at += len(data)
            self.write(data)

    def _send_blob(self, request: protocol.GetBlob) -> None:
        """Send a blob, for a host that comes to a job later."""
        path = places.blob(request.sha256)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self.say(protocol.Data(size_bytes=size))
            self._send_part(file, 0, size)

    def _send_jobs(self, request: protocol.ListJobs) -> None:
        """Send what this host has of jobs."""
        for one in listing.jobs(request.job):
            self.say(
                protocol.Jobs(jobs=(one,))
            )  # a line each: all of them can be longer than a line may be
        self.say(protocol.Jobs())

    def _remove_job(self, request: protocol.RemoveJob) -> None:
        """Remove what a job that has ended left here."""
        self.say(protocol.Removed(size_bytes=listing.remove(request.job)))

    def _prune_blobs(self, request: protocol.PruneBlobs) -> None:
        """Send how many bytes of unused blobs and environments are kept; remove these if the request asks for it."""
        found = expiry.unused(Path(sys.path[0]).name)
        if request.removes:
            expiry.remove(path for path, _ in found)
        self.say(protocol.Removed(size_bytes=sum(size for _, size in found)))

    # ---- working directories

    def _send_work_dirs(self, _: protocol.ListWorkDirs) -> None:
        """Send what working directories are here."""
        self.say(protocol.WorkDirs(dirs=work_dirs.kept()[:_MOST_WORK_DIRS]))

    def _remove_work_dir(self, request: protocol.RemoveWorkDir) -> None:
        """Remove a working directory that no job uses."""
        self.say(protocol.Removed(size_bytes=work_dirs.remove(request.name)))

    # ---- templates

    def _ensure_template(self, request: protocol.TemplateRequest) -> None:
        """Have a template. No answer: where there can be none, jobs are started by exec."""
        self._owner = request.owner
        with contextlib.suppress(OSError, ValueError):
            template_client.ensure(
                request, self._umask, logout.survivor_prefix(must=False)
            )

    def renew_templates(self, _: protocol.RenewLease | None = None) -> None:
        """Renew the lease of the templates of this conversation's notebook."""
        if self._owner:
            template_client.renew(self._owner)

    def _send_templates(self, request: protocol.ListTemplates) -> None:
        """Send what is kept loaded for a notebook."""
        self.say(protocol.Templates(templates=template_client.templates(request.owner)))

    def _end_templates(self, request: protocol.EndTemplates) -> None:
        """End what is kept loaded for a notebook."""
        template_client.end_all(request.owner)
        self.say(protocol.Templates())

    # ---- processes that a dead agent left

    def _sweep_job(self, request: protocol.SweepJob) -> None:
        """End what is left of a node of a job, and what dead agents left of its other nodes.

        An agent of another node goes on: one host may be several nodes of a job, under several names.
        """
        own = None
        if request.node_rank is not None:
            own = places.run_dir(request.job, request.node_rank)
        spared = []
        deserted = []
        for folder in places.run_dirs(request.job):
            agent = processes.noted(folder / places.PID)
            if agent is not None and folder != own:
                spared.append(agent)
            else:
                deserted.append(folder)
        left = processes.sweep(request.job, spared=spared)
        for folder in deserted:
            shutil.rmtree(folder, ignore_errors=True)
        names = [
            f"{process.name} (pid {process.pid}, state {process.state})"
            for process in left
        ]
        self.say(protocol.Final(reason="swept", survivors=tuple(names)))


def _sweep_dead() -> None:
    """End what is left of agents that were killed together with their notebook: no other contact came to do it."""
    for job, folders in places.dead_runs().items():
        if any(
            processes.has_role(process, "agent") for process in processes.marked(job)
        ):
            continue  # the agent lives: a cleaner of /tmp has removed its socket
        processes.sweep(job, timeout_s=1.0)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    for folder in (*places.dead_templates(), *places.forgotten()):
        shutil.rmtree(folder, ignore_errors=True)


def _last_line(path: Path) -> str:
    """Return the last line of a log that isn't blank, "" for none; of a long one its beginning."""
    try:
        text = path.read_bytes()[-8192:].decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.split("\n")]
    lines = [line for line in lines if line]
    return lines[-1][:500] if lines else ""


def _exec(
    request: protocol.StartNode,
    listener: socket.socket,
    log: IO[bytes],
    prefix: tuple[str, ...],
    umask: int,
) -> Callable[[], object]:
    """Start the agent in its own session, its listening socket inherited, its `StartNode` on stdin: no secret in argv."""
    log_bytes = str(places.log_limit_bytes(request.env))
    env = {**os.environ, processes.MARK: request.job, places.LOG_BYTES_NAME: log_bytes}
    child = subprocess.Popen(
        [*prefix, sys.executable, "-u", sys.path[0], "agent", str(listener.fileno())],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=env,
        pass_fds=(listener.fileno(),),
        start_new_session=True,
        umask=umask,
    )
    assert child.stdin is not None
    child.stdin.write(protocol.encode(request))
    child.stdin.close()
    return child.wait


def main(_: list[str]) -> None:
    """Serve one channel."""
    try:
        Contact(os.umask(0o077)).run()
    except BrokenPipeError:
        sys.exit(0)  # nobody reads any more
