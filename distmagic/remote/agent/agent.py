"""The loop of the agent. The package's `__init__` describes states and promises."""

from __future__ import annotations

import os
import resource
import selectors
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from distmagic.remote.agent.ending import LEFTOVER_GRACE_S, NodeEnd
from distmagic.remote.agent.endpoint import Dialer
from distmagic.remote.agent.hardware_watch import HardwareWatch
from distmagic.remote.agent.rank_stream import RankStream
from distmagic.remote.agent.rank_table import RankTable
from distmagic.remote.agent.reader import Reader
from distmagic.remote.agent.reader_table import ReaderTable
from distmagic.remote.agent.stack_dump import StackDumper
from distmagic.remote.engine import engine, engine_start
from distmagic.remote.gang.channel import Cause, GangChannel
from distmagic.remote.gang.elastic_members import ElasticMembers
from distmagic.remote.records import environments, listing, places, work_dirs
from distmagic.remote.records.journal import FILE, Journal
from distmagic.remote.system import exit_codes, memory, processes
from distmagic.remote.system.customization import customizing_file
from distmagic.remote.wire import protocol

_TICK_S = 0.05
_LOOK_S = 1.0  # pause between two checks that the sockets exist
_TOUCH_S = 30.0  # well within the time after which `places` treats a file as unused
_GOODBYE_S = 2.0  # time for peers to receive the end by heartbeats, if the notebook stops them too


class Agent:
    """The agent of one node. `run` returns when no process of the job is left except this one."""

    def __init__(
        self,
        start: protocol.StartNode,
        listener: socket.socket,
        clock: Callable[[], float],
        devices: Sequence[int] = (),
    ) -> None:
        self.start = start
        self.devices = devices  # reserves the devices while it is open
        self.clock = clock
        self.folder = places.job_dir(start.job, start.node_rank)
        self.run_dir = places.run_dir(start.job, start.node_rank)
        self.journal = Journal(self.folder)
        self.selector = selectors.DefaultSelector()
        self.rank_table = RankTable(self.folder, self.journal, self.selector, clock)
        modules = f"{start.work.path}/" if start.work is not None else ""
        self.stack_dumper = StackDumper(
            self.run_dir, places.blob(start.code), sys.path[0], self.journal, modules
        )
        self.ending = NodeEnd(
            start, self.journal, self.rank_table, self.stack_dumper, clock()
        )
        self.reader_table = ReaderTable(
            self.journal, self.selector, clock, self._handle, self._notice_once
        )
        self.engine_cgroup: memory.Cgroup
        self.hardware: HardwareWatch
        self.engine_code: int | None = None  # torchrun's exit code, None while it runs
        self.notices: set[str] = set()  # texts of errors that are in the journal
        self.dialer: Dialer | None = None
        self.elastic_members = ElasticMembers(
            start,
            lambda node_rank: self.ending.gang.is_alive(node_rank),  # noqa: PLW0108 - it joins later
            clock(),
        )
        self.touch_at = clock()
        self.look_at = self.touch_at + _LOOK_S
        # Ranks get the user's own umask; the agent's files are for the user only.
        self.umask = os.umask(0o077)
        self.reader_table.listen(listener)
        self.rank_table.listen(str(self.run_dir / places.RANKS))

    # ---- start

    def begin(self) -> None:
        """Journal `Hello`, start sending heartbeats, and start torchrun."""
        hello = protocol.Hello(
            protocol=protocol.PROTOCOL,
            job=self.start.job,
            node_rank=self.start.node_rank,
            hostname=socket.gethostname(),
            pid=os.getpid(),
        )
        self.journal.add(hello)
        # Without it, a sweep of another node on this host could not spare this agent.
        with suppress(OSError):
            processes.note(os.getpid(), self.run_dir / places.PID)
        self._join_gang()
        env = engine.environment(
            self.start, dict(os.environ), self.folder, self.run_dir
        )
        customizes = customizing_file(env)
        # For a forked agent, `warm` is None.
        if self.start.warm is not None and customizes:
            text = f"no warm process: {customizes} is on PYTHONPATH, and runs at the start of every process"
            self.journal.notice(text)
        self.ending.engine_pid, out, err = engine_start.start_engine(
            self.start.torchrun, self.start.cwd, env, self.umask
        )
        # Only now: torchrun and its ranks have inherited the user's own limit. This process needs
        # up to eight descriptors for each rank, and the usual limit is 1,024.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.engine_cgroup = memory.Cgroup(self.ending.engine_pid)
        self.hardware = HardwareWatch(env.get("CUDA_VISIBLE_DEVICES"))
        self.rank_table.add_stream(
            RankStream(out, self.folder, -1, "stdout", self.clock())
        )
        self.rank_table.add_stream(
            RankStream(err, self.folder, -1, "stderr", self.clock())
        )
        if self.start.endpoint:
            address, port = self.start.endpoint.split()
            self.dialer = Dialer(
                address, int(port), lead=self.start.lead, now=self.clock()
            )

    def _join_gang(self) -> None:
        membership = self.start.membership
        min_nodes = self.start.terms.min_nodes
        if membership is None:
            return
        try:
            channel = GangChannel(
                self.start.node_rank, membership, min_nodes, self.journal, self.clock()
            )
            channel.watch(self.selector)
            self.ending.channel = channel
        except OSError as error:
            # The job can run without heartbeats: each node then depends on its own lease.
            text = f"no channel to the other hosts at {membership.address}: {error}"
            self.journal.notice(text)

    # ---- the loop

    def run(self) -> None:
        """Run until the job has ended on this node and no peer or reader waits for anything."""
        while not self.may_go():
            self.turn(_TICK_S)

    def turn(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for readable descriptors, handle them, and do everything that is
        due.
        """
        self._handle_readable(timeout_s)
        self._tick(self.clock())

    def _handle_readable(self, timeout_s: float) -> None:
        for key, _ in self.selector.select(timeout_s):
            try:
                key.data()  # calls the function with which the descriptor is registered
            except OSError as error:  # an error of the system must not end the job
                self._notice_once(f"the agent continues after a system error: {error}")
                # The descriptor may remain readable: without a pause the loop would use a whole
                # core.
                time.sleep(_TICK_S)

    def _notice_once(self, text: str) -> None:
        # No event of this node may follow `Final`.
        if text not in self.notices and self.ending.final_at is None:
            self.notices.add(text)
            self.journal.notice(text)

    def may_go(self) -> bool:
        """Whether the agent may exit."""
        ending = self.ending
        if ending.final_at is None:
            return False
        now = self.clock()
        if not ending.gang.may_leave:
            peers_learn_from_notebook = (
                ending.stopped_by_notebook and now > ending.final_at + _GOODBYE_S
            )
            if not peers_learn_from_notebook:
                return False
        return ending.lease.has_run_out(now) or self.reader_table.have_all

    def _tick(self, now: float) -> None:
        """Do everything that is due, even if no descriptor became readable."""
        ending = self.ending
        self._reap(now)
        if self.dialer is not None:
            endpoint = self.dialer.poll(now)
            if endpoint is not None:
                self.journal.add(endpoint)
        self.rank_table.write(now)
        self.stack_dumper.step(now, self.rank_table.ranks)
        self.rank_table.forget_gone(now)
        if not ending.termination.has_begun:
            self.rank_table.notice_lingering(now)
        if now >= self.touch_at and ending.final_at is None:
            self.touch_at = now + _TOUCH_S
            self._touch()
        if now >= self.look_at and ending.final_at is None:
            self.look_at = now + _LOOK_S
            self._renew_run_dir()
        ending.step(now)
        # A torchrun that has just ended is no longer a descendant: `_reap` must journal its end
        # first, in the next turn. If torchrun itself survives SIGKILL, it has no end.
        is_torchrun_over = self.engine_code is not None or ending.termination.survivors
        if ending.termination.is_done and is_torchrun_over and ending.final_at is None:
            self._finish(now)
        news = self.hardware.news()
        if news is not None and ending.final_at is None:
            self.reader_table.tell(news)
        self.reader_table.send(now, ending.final_at)

    def _touch(self) -> None:
        """Update the timestamps of this job's files, so that neither a contact nor a cleaner of
        /tmp removes them.

        Without its sockets an agent can't be reached, and a contact treats its job as dead.
        """
        blobs = (self.start.call, self.start.code, *self.start.side_files)
        in_run_dir = ("", places.READERS, places.RANKS, places.PID)
        places.touch(
            [
                self.folder / FILE,
                sys.path[0],
                *map(places.blob, blobs),
                *(self.run_dir / name for name in in_run_dir),
            ]
        )
        environments.touch_own()
        if self.start.work is not None:
            work_dirs.touch(
                Path(self.start.work.path), self.start.job, self.start.node_rank
            )

    def _renew_run_dir(self) -> None:
        """Recreate files that a cleaner of /tmp removed: notebooks and restarted ranks need them to
        find this agent.
        """
        # Another process has the name now, or the disk is full.
        with suppress(OSError):
            if not self.run_dir.exists():
                places.make_run_dir(self.start.job, self.start.node_rank)
            places.check_run_dir(self.run_dir)
            if not (self.run_dir / places.READERS).exists():
                self.reader_table.listen(places.reader_listener(self.run_dir))
            if not (self.run_dir / places.RANKS).exists():
                self.rank_table.listen(str(self.run_dir / places.RANKS))
            if processes.noted(self.run_dir / places.PID) is None:
                processes.note(os.getpid(), self.run_dir / places.PID)

    def _reap(self, now: float) -> None:
        """Collect ended children.

        If torchrun is among them, journal its end and start to end all processes.
        """
        status = processes.reap().get(self.ending.engine_pid)
        self.rank_table.notice_ends()
        if status is None:
            return
        # Packets may have come after the last turn: a rank's end has a connection of its own.
        self._handle_readable(0.0)
        self._handle_readable(0.0)
        self.rank_table.notice_ends()
        self.engine_code = (
            0 if self.ending.has_left_barrier else os.waitstatus_to_exitcode(status)
        )
        if exit_codes.is_kill(self.engine_code):
            why = self.rank_table.memory.why(self.engine_cgroup)
            if why:
                self.journal.notice(f"its torchrun was killed: {why}")
        # If a signal ended torchrun, stop this node alone: for the others of an elastic job that is
        # a lost node.
        is_elastic = self.start.terms.is_elastic
        if (
            is_elastic
            and exit_codes.is_signal(self.engine_code)
            and not (self.start.lead or self.ending.termination.has_begun)
        ):
            text = f"its torchrun was ended ({exit_codes.meaning_of(self.engine_code)}); the others continue without this node"
            self.journal.notice(text)
            self.ending.stop(now, Cause("lost", self.start.node_rank))
        # `EngineEnded` follows the ends of all ranks that are known so far; a reader need not wait
        # for more after it.
        self.rank_table.write(now, last=True)
        self.journal.add(
            protocol.EngineEnded(
                code=self.engine_code, exits=self.rank_table.engine_exits
            )
        )
        self.rank_table.end_unreported(self.engine_code)
        if self.engine_code != 0 and not self._joined_in_vain():
            self.ending.stop(now, Cause("failed", self.start.node_rank))
        # For processes that ranks left running; the job itself succeeded.
        self.ending.termination.begin(now, LEFTOVER_GRACE_S)

    def _joined_in_vain(self) -> bool:
        """Whether this node joined an elastic job late and never had a rank: its failure does not
        affect the job.
        """
        membership = self.start.membership
        return (
            membership is not None
            and self.start.node_rank >= membership.nodes
            and not self.rank_table.ranks
        )

    # ---- requests of readers

    def _handle(self, reader: Reader, request: protocol.Message, now: float) -> None:
        """Carry out a notebook's request. Each request renews the lease."""
        self.ending.lease.renew(now)
        if isinstance(request, protocol.StopNode):
            self.ending.obey(request, now)
        elif isinstance(request, protocol.DetachJob):
            self.ending.detach("asked")
        elif isinstance(request, protocol.DumpStacks):
            self.stack_dumper.request(request.request_id, quietly=request.quietly)
        elif isinstance(request, protocol.RankInput):
            self.rank_table.type(request)
        elif isinstance(request, protocol.HandedOn):
            self.rank_table.hand_on(request)
        elif isinstance(request, protocol.GetStart):
            reader.answer(protocol.LeadStart(start=self.start))
        elif isinstance(request, protocol.AddNode):
            self._add_node(reader, request, now)

    def _add_node(self, reader: Reader, request: protocol.AddNode, now: float) -> None:
        try:
            added = self.elastic_members.add(
                request,
                now,
                is_ending=self.ending.termination.has_begun,
                has_returned_node=self.rank_table.have_all_returned
                or self.ending.gang.has_returned_node,
            )
        except ValueError as error:
            reader.answer(protocol.Refused(what="add_node", error=str(error)))
            return
        listing.note_hosts(self.folder, added.hosts)
        # An event, not an answer: all notebooks that follow the job need it.
        self.journal.add(added)

    # ---- end

    def _finish(self, now: float) -> None:
        """Journal `Final`. Every process of the job has ended, except the survivors that it
        names.
        """
        self.rank_table.finish(now)
        for descriptor in self.devices:
            os.close(descriptor)
        # Before the notebook receives the end, and starts the next run.
        if self.start.work is not None:
            work_dirs.leave(
                Path(self.start.work.path), self.start.job, self.start.node_rank
            )
        self.journal.add(
            protocol.Final(
                reason=self.ending.reason, survivors=self.ending.termination.survivors
            )
        )
        self.ending.final_at = now
        self.ending.step(now)  # peers wait for this node's end
        # From now on a contact finds no socket of this agent and reads the journal itself.
        shutil.rmtree(self.run_dir, ignore_errors=True)
