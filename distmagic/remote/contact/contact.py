"""The process behind one SSH channel: answers the notebook, one request after the other.

It keeps no state: it ends with its channel, and agents run on under their lease.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from distmagic.remote.contact import (
    blob_receiver,
    file_exchange,
    sweep,
    template_client,
)
from distmagic.remote.contact.agents import Agents
from distmagic.remote.records import (
    brought_files,
    environments,
    expiry,
    listing,
    places,
    work_dirs,
)
from distmagic.remote.system import facts, logout
from distmagic.remote.system.device_claims import DeviceClaims
from distmagic.remote.wire import protocol
from distmagic.remote.wire.lines import Lines

if TYPE_CHECKING:
    from distmagic.remote.checkup.doors import Doors

_CHUNK = 1 << 20
_MOST_WORK_DIRS = 1000
# Before the end of a file nothing is answered by nothing: who sends a file does not read meanwhile.
_TAIL_BYTES = 1 << 14
_ON_ITS_WAY_S = 0.002  # after this time the rest is taken to wait for an answer
# After these requests nobody waits any more for the blobs that came before.
_ENDS_OF_DELIVERY = (protocol.StartNode, protocol.PlaceFiles, protocol.GetFacts)
_TOUCH_S = 30.0  # well within the time after which `expiry` treats a file as unused


class Contact:
    """The conversation on stdin and stdout.

    Only messages are written to stdout: other prints go to stderr.
    """

    def __init__(self, umask: int) -> None:
        self._umask = umask  # the user's own, for the ranks
        self.out = os.dup(1)
        os.dup2(2, 1)
        self.lines = Lines()
        # See `request.hosts.Source.needs_answers`: whether the notebook needs them, and whether
        # nothing was sent since it has sent something.
        self._needs_answers = self._owes_answer = False
        self.owner = ""  # the notebook whose templates this conversation renews
        self._port_holder: socket.socket | None = None
        self._receiver = blob_receiver.BlobReceiver(self)
        self._doors: Doors | None = None
        self._devices = DeviceClaims()
        self._agents = Agents(self, umask, self._devices)
        files = file_exchange.FileExchange(self, umask)
        self._handlers: dict[type, Callable[[Any], object]] = {
            protocol.GetFacts: self._send_facts_again,
            protocol.GetRoute: self._send_route,
            protocol.GetFreePort: self._send_free_port,
            protocol.Examine: self._examine,
            protocol.Knock: self._knock,
            protocol.ClaimDevices: self._claim_devices,
            protocol.CheckBlobs: self._receiver.check,
            protocol.OfferBlobs: self._receiver.offer,
            protocol.ServeBlobs: self._receiver.serve,
            protocol.ReceiveBlobs: self._receiver.take,
            protocol.GetBlob: files.send_blob,
            protocol.PruneBlobs: self._prune_blobs,
            protocol.StartNode: self._start_node,
            protocol.FollowJob: self._agents.follow,
            protocol.GetFile: files.send_job_file,
            protocol.ResultTaken: files.note_taken,
            protocol.ProfileRanks: self._profile,
            protocol.ListJobs: self._send_jobs,
            protocol.RemoveJob: self._remove_job,
            protocol.SweepJob: self._sweep_job,
            protocol.ListFiles: files.list,
            protocol.ReadFile: files.send,
            protocol.WriteFile: files.receive,
            protocol.CompareFiles: files.compare,
            protocol.PlaceFiles: files.place,
            protocol.ListWorkDirs: self._send_work_dirs,
            protocol.RemoveWorkDir: self._remove_work_dir,
            protocol.SyncEnvironment: self._sync_environment,
            protocol.TemplateRequest: self._ensure_template,
            protocol.RenewLease: self.renew_templates,
            protocol.ListTemplates: self._send_templates,
            protocol.EndTemplates: self._end_templates,
        }

    def run(self) -> None:
        """Send the facts about this host, then answer requests until end of file."""
        self._send_facts()
        environments.touch_own()
        # After the facts, for which the notebook waits: this is slow on a slow disk.
        with suppress(OSError):
            sweep.sweep_dead()
        with suppress(OSError):
            expiry.tidy()
        line = self._line()
        while line is not None:
            _, request = protocol.decode(line)
            # A request for an agent that has ended meanwhile has no handler here.
            if type(request) in self._handlers:
                self._answer(request)
            line = self._line()

    def _answer(self, request: protocol.Message) -> None:
        # Blobs are served to the next host while they arrive on this one. Any other request means
        # that the delivery is over.
        if not isinstance(request, protocol.ServeBlobs | protocol.ReceiveBlobs):
            self._receiver.close()
        try:
            self._handlers[type(request)](request)
        except (OSError, ValueError) as error:
            self.say(protocol.Refused(what=protocol.name_of(request), error=str(error)))
        if isinstance(request, _ENDS_OF_DELIVERY):
            self._receiver.awaited = ()

    # ---- bytes

    def say(self, message: protocol.Message) -> None:
        """Send a message to the notebook."""
        self.write(protocol.encode(message))

    def write(self, data: bytes) -> None:
        """Send bytes to the notebook."""
        self._owes_answer = False
        view = memoryview(data)
        while view:
            view = view[os.write(self.out, view) :]

    def _line(self) -> bytes | None:
        while not (line := self.lines.line()):
            if line is not None:
                self._needs_answers = True  # an empty line: the notebook does the same
                continue
            self._answer_by_nothing()
            # Other hosts may take minutes to receive a payload that this one already has. Meanwhile
            # only this protects its files.
            while not select.select([0], [], [], _TOUCH_S)[0]:
                places.touch(self._receiver.awaited)
                environments.touch_own()
                if self._devices.descriptors:
                    # An empty line, which the notebook ignores. If a firewall has cut the
                    # connection, this host's SSH server only notices it when it sends something;
                    # devices would stay reserved for hours.
                    try:
                        self.write(b"\n")
                    except OSError:
                        sys.exit(0)
            data = os.read(0, 65536)
            if not data:
                return None
            self.lines.feed(data)
            self._owes_answer = bool(data.strip(b"\n"))
        return line

    def _answer_by_nothing(self) -> None:
        """Send an empty line before waiting for more, if the notebook may wait for an answer."""
        if self._needs_answers and self._owes_answer:
            is_on_its_way = select.select([0], [], [], _ON_ITS_WAY_S)[0]
            if not is_on_its_way:
                self.write(b"\n")

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes from the notebook."""
        while size:
            most = min(size, _CHUNK)
            data = self.lines.take(most)
            if not data:
                if size <= _TAIL_BYTES:
                    self._answer_by_nothing()
                data = os.read(0, most)
                self._owes_answer = True
            if not data:
                sys.exit(0)  # the channel ended in the middle of a file
            size -= len(data)
            yield data

    def wait(self, pipe: IO[bytes] | None, timeout_s: float) -> None:
        """Wait until `pipe` can be read, or the time is over, which raises TimeoutError.

        Meanwhile read from the notebook; exit if its channel has ended.
        """
        sources: list[int | IO[bytes]] = [0] if pipe is None else [0, pipe]
        ready, _, _ = select.select(sources, [], [], timeout_s)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                sys.exit(0)  # the channel has ended
            self.lines.feed(data)
        elif not ready:
            raise TimeoutError

    # ---- this host

    def _send_facts(self) -> None:
        found = facts.gather(places.home(), places.host_id())
        write_error = found.write_error or places.write_error()
        self.say(replace(found, running=listing.running(), write_error=write_error))

    def _send_facts_again(self, _: protocol.GetFacts) -> None:
        """Send the facts again: a port that was free may be in use now.

        Refused if the bundle is gone.
        """
        os.stat(sys.path[0])
        self._send_facts()

    def _send_route(self, request: protocol.GetRoute) -> None:
        """Send this host's address on its route to a peer, and its time."""
        address, interface = facts.route(request.peer)
        now = time.time()
        self.say(protocol.Route(address=address, interface=interface, time_s=now))

    def _send_free_port(self, request: protocol.GetFreePort) -> None:
        """Send a port that is free now, and reserve it against other runs while this contact
        lives.
        """
        port, holder = facts.reserve_port(request.address)
        if self._port_holder is not None:
            self._port_holder.close()  # for the previous run
        self._port_holder = holder
        self.say(protocol.FreePort(port=port))

    def _examine(self, request: protocol.Examine) -> None:
        """Send the doctor's data about this host, and listen for other hosts from now on."""
        from distmagic.remote.checkup import doors, examination  # rarely needed

        found = examination.examine(request.packages)
        try:
            address, interface = facts.route(request.peer)
        except OSError:  # no route to it
            address, interface = facts.route("")
        self._close_doors()
        self._doors = doors.Doors(address, request.ports, request.secret)
        # The time is read last, so that it is as recent as possible on arrival.
        route = protocol.Route(address=address, interface=interface, time_s=time.time())
        self.say(replace(found, route=route, ports=self._doors.ports))

    def _close_doors(self) -> None:
        if self._doors is not None:
            self._doors.close()
            self._doors = None

    def _knock(self, request: protocol.Knock) -> None:
        """Send the ports of other hosts to which this host can connect, or stop listening for
        others.
        """
        from distmagic.remote.checkup.doors import knock  # rarely needed

        if not request.doors:
            self._close_doors()
        self.say(protocol.Knocked(answers=knock(request.doors)))

    def _claim_devices(self, request: protocol.ClaimDevices) -> None:
        """Reserve devices for a job, or send the jobs that have them; details of this user's jobs
        are in their list.
        """
        if not request.devices:
            self._devices.release()
            self.say(protocol.DevicesClaimed())
            return
        others = self._devices.take(request.job, request.devices)
        running = {one.job: one for one in listing.running()} if others else {}
        told = []
        for claim in others:
            job = running.get(claim.job)
            if job is None:
                told.append(claim)
            else:
                owner = job.terms.owner
                told.append(replace(claim, owner=owner, since_s=job.began_s))
        self.say(protocol.DevicesClaimed(others=tuple(told)))

    # ---- jobs

    def _start_node(self, request: protocol.StartNode) -> None:
        """Start an agent, and forward bytes until it ends."""
        self._receiver.awaited = ()  # from now on the agent protects them
        try:
            self._agents.start(request)
        finally:
            self._devices.release()  # of a job for which no agent was started

    def _sweep_job(self, request: protocol.SweepJob) -> None:
        """End what is left of a node of a job, and of dead agents of its other nodes."""
        survivors = sweep.sweep_node(request.job, request.node_rank)
        self.say(protocol.Final(reason="swept", survivors=survivors))

    def _profile(self, request: protocol.ProfileRanks) -> None:
        """Make the ranks of a node profile themselves, and send the result."""
        from distmagic.remote.training import profiling  # rarely needed

        run_dir = places.run_dir(request.job, request.node_rank)
        profiling.ask(run_dir, request.profile, request.steps)
        folder = places.job_dir(request.job, request.node_rank)
        files, waiting = profiling.found(run_dir, folder, request.profile)
        self.say(protocol.Profiled(files=files, waiting=waiting))

    def _send_jobs(self, request: protocol.ListJobs) -> None:
        """Send the jobs of this host."""
        for one in listing.jobs(request.job):
            # One line each: all of them may exceed the limit of a line.
            self.say(protocol.Jobs(jobs=(one,)))
        self.say(protocol.Jobs())

    def _remove_job(self, request: protocol.RemoveJob) -> None:
        """Remove the files of a finished job."""
        freed = listing.remove(request.job, request.owner)
        self.say(protocol.Removed(size_bytes=freed))

    def _prune_blobs(self, request: protocol.PruneBlobs) -> None:
        """Send the size of unused blobs and environments; remove them if requested."""
        now = places.now_at(places.home())
        found = expiry.unused(Path(sys.path[0]).name, now, request.owner)
        if request.removes:
            expiry.remove(path for path, _ in found)
        self.say(protocol.Removed(size_bytes=sum(size for _, size in found)))

    # ---- working directories

    def _send_work_dirs(self, _: protocol.ListWorkDirs) -> None:
        """Send the working directories of this host, and the files that `put` brought."""
        dirs = (*work_dirs.kept(), *brought_files.kept())
        self.say(protocol.WorkDirs(dirs=dirs[:_MOST_WORK_DIRS]))

    def _remove_work_dir(self, request: protocol.RemoveWorkDir) -> None:
        """Remove a working directory that no job uses, or files that `put` brought."""
        is_path = request.name.startswith("/")
        remove = brought_files.remove if is_path else work_dirs.remove
        self.say(protocol.Removed(size_bytes=remove(request.name)))

    # ---- environments

    def _sync_environment(self, request: protocol.SyncEnvironment) -> None:
        """Make a virtual environment, or find it."""
        # Rarely needed.
        from distmagic.remote.contact.environment_sync import EnvironmentSync

        EnvironmentSync(self).sync(request)

    # ---- templates

    def _ensure_template(self, request: protocol.TemplateRequest) -> None:
        """Start or find a template.

        No answer is sent: without a template, jobs are started by exec.
        """
        self.owner = request.owner
        with suppress(OSError, ValueError):
            template_client.ensure(
                request, self._umask, logout.survivor_prefix(must=False)
            )

    def renew_templates(self, *_: object) -> None:
        """Renew the lease of the templates of this conversation's notebook."""
        if self.owner:
            template_client.renew(self.owner)

    def _send_templates(self, request: protocol.ListTemplates) -> None:
        """Send the templates of a notebook."""
        self.say(protocol.Templates(templates=template_client.templates(request.owner)))

    def _end_templates(self, request: protocol.EndTemplates) -> None:
        """End the templates of a notebook."""
        template_client.end_all(request.owner)
        self.say(protocol.Templates())


def main(_: list[str]) -> None:
    """Serve one channel."""
    try:
        Contact(os.umask(0o077)).run()
    except BrokenPipeError:
        sys.exit(0)  # no reader is left
