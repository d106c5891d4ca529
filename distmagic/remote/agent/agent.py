"""The loop of the agent, and every decision to stop. The package's `__init__` describes states and promises."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from distmagic.remote.agent import polite_stop
from distmagic.remote.agent.endpoint import Dialer
from distmagic.remote.agent.hardware_watch import HardwareWatch
from distmagic.remote.agent.lease import CellWait, Lease
from distmagic.remote.agent.polite_stop import PoliteStop
from distmagic.remote.agent.rank_stream import RankStream
from distmagic.remote.agent.rank_table import RankTable
from distmagic.remote.agent.reader import Reader
from distmagic.remote.agent.reader_table import ReaderTable
from distmagic.remote.agent.restart_wait import RestartWait
from distmagic.remote.agent.stack_dump import StackDumper
from distmagic.remote.agent.termination import Termination
from distmagic.remote.engine import engine, engine_start
from distmagic.remote.gang.channel import Cause, GangChannel
from distmagic.remote.gang.elastic_members import ElasticMembers
from distmagic.remote.records import environments, listing, places, work_dirs
from distmagic.remote.records.journal import FILE, Journal
from distmagic.remote.system import exit_codes, memory, processes
from distmagic.remote.system.customization import customizing_file
from distmagic.remote.wire import protocol
from distmagic.remote.wire.vocabulary import StopReason, known_stop_reason

_TICK_S = 0.05
_LOOK_S = 1.0  # pause between two checks that the sockets exist
_TOUCH_S = 30.0  # well within the time after which `places` treats a file as unused
_LEFTOVER_GRACE_S = 1.0  # for processes that ranks left running when torchrun exited
# Time after the last datagram of a lost node: ranks that start in this time still try to meet it. torchrun forms a
# round without it after its `last_call_timeout` of 5 s at the earliest.
_NO_NEW_ROUND_S = 3.0
_GRACE_S = 3.0  # between SIGTERM and SIGKILL, after a failure or a loss
# Time after the timeout: a notebook that follows the job stops all nodes at once, which is better. Before that it may
# ask ranks for their stacks, which takes up to 6 s.
_NOTEBOOK_FIRST_S = 7.0
_GOODBYE_S = 2.0  # time for peers to receive the end by heartbeats, if the notebook stops them too
_TORCHRUN_REPORT_S = 0.5  # for torchrun to report exit codes after a rank has failed
_LAST_CALLS_S = 1.0  # for ranks to leave their calls before they are ended, because a rank of another node has failed


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
        self.termination = Termination()
        self.polite_stop: PoliteStop | None = None
        self.last_calls_until: float | None = None  # the end waits for ranks' calls
        self.reader_table = ReaderTable(
            self.journal, self.selector, clock, self._handle, self._notice_once
        )
        self.engine_pid = 0
        self.engine_cgroup: memory.Cgroup
        self.hardware: HardwareWatch
        self.engine_code: int | None = None  # torchrun's exit code, None while it runs
        self.reason: StopReason | Literal["done"] = "done"  # goes into `Final`
        self.cause: Cause | None = (
            None  # why this node stops, if it does; sent to the peers
        )
        self.got_sigterm = False  # set by the signal handler, acted on by the loop
        self.stopped_by_notebook = False  # the notebook then stops the peers too, so they need no heartbeat about it
        self.final_at: float | None = None  # when `Final` was written
        self.notices: set[str] = set()  # texts of errors that are in the journal
        self.formations = 0  # the number of restarts of all ranks that the lead has requested and this node has done
        # torchrun was ended while it waited for a lost node; all ranks of this node had succeeded
        self.has_left_barrier = False
        self.dialer: Dialer | None = None
        self.channel: GangChannel | None = None
        self.elastic_members = ElasticMembers(start, self._is_alive, clock())
        self.restart_wait = RestartWait()
        self.lease = Lease(clock(), start.terms.lease_s, keep=start.terms.goes_on_alone)
        self.cell_wait = CellWait(clock(), start.terms.ends_idle_s)
        self.began = self.touch_at = self.ticked_at = clock()
        self.paused_s = (
            0.0  # how long a rank of the job has waited for the user's input
        )
        self.look_at = self.began + _LOOK_S
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
        with contextlib.suppress(OSError):
            processes.note(os.getpid(), self.run_dir / places.PID)
        self._join_gang()
        env = engine.environment(
            self.start, dict(os.environ), self.folder, self.run_dir
        )
        customizes = customizing_file(env)
        # For a forked agent, `warm` is None.
        if self.start.warm is not None and customizes:
            text = f"no warm process: {customizes} is on PYTHONPATH, and runs at the start of every process"
            self.journal.add(protocol.Notice(text=text))
        self.engine_pid, out, err = engine_start.start_engine(
            self.start.torchrun, self.start.cwd, env, self.umask
        )
        # Only now: torchrun and its ranks have inherited the user's own limit. This process needs up to eight
        # descriptors for each rank, and the usual limit is 1,024.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.engine_cgroup = memory.Cgroup(self.engine_pid)
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
            self.channel = GangChannel(
                self.start.node_rank, membership, min_nodes, self.journal, self.clock()
            )
            self.channel.watch(self.selector)
        except OSError as error:
            # The job can run without heartbeats: each node then depends on its own lease.
            text = f"no channel to the other hosts at {membership.address}: {error}"
            self.journal.add(protocol.Notice(text=text))

    def _is_alive(self, node_rank: int) -> bool | None:
        return (
            self.channel.gang.is_alive(node_rank) if self.channel is not None else None
        )

    # ---- the loop

    def run(self) -> None:
        """Run until the job has ended on this node and no peer or reader waits for anything."""
        while not self.may_go():
            self.turn(_TICK_S)

    def turn(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for readable descriptors, handle them, and do everything that is due."""
        for key, _ in self.selector.select(timeout_s):
            try:
                key.data()  # calls the function with which the descriptor is registered
            except OSError as error:  # an error of the system must not end the job
                self._notice_once(f"the agent continues after a system error: {error}")
                # The descriptor may remain readable: without a pause the loop would use a whole core.
                time.sleep(_TICK_S)
        self._tick(self.clock())

    def _notice_once(self, text: str) -> None:
        # No event of this node may follow `Final`.
        if text not in self.notices and self.final_at is None:
            self.notices.add(text)
            self.journal.add(protocol.Notice(text=text))

    def may_go(self) -> bool:
        """Whether the agent may exit."""
        if self.final_at is None:
            return False
        now = self.clock()
        if self.channel is not None and not self.channel.gang.may_leave:
            peers_learn_from_notebook = (
                self.stopped_by_notebook and now > self.final_at + _GOODBYE_S
            )
            if not peers_learn_from_notebook:
                return False
        if self.lease.has_run_out(now):
            return True
        return self.reader_table.have_all

    def _tick(self, now: float) -> None:
        """Do everything that is due, even if no descriptor became readable."""
        self._reap(now)
        self._let_pass(now)
        if self.dialer is not None:
            endpoint = self.dialer.poll(now)
            if endpoint is not None:
                self.journal.add(endpoint)
        self.rank_table.write(now)
        self.stack_dumper.step(now, self.rank_table.ranks)
        self.rank_table.forget_gone(now)
        if not self.termination.has_begun:
            self.rank_table.notice_lingering(now)
        if now >= self.touch_at and self.final_at is None:
            self.touch_at = now + _TOUCH_S
            self._touch()
        if now >= self.look_at and self.final_at is None:
            self.look_at = now + _LOOK_S
            self._renew_run_dir()
        self._stop_if_due(now)
        self._end_after_last_calls(now)
        if self.polite_stop is not None:
            has_ending_peer = (
                self.channel is not None and self.channel.gang.has_ending_node
            )
            if self.polite_stop.look(
                self.rank_table.ranks, now, has_ending_peer=has_ending_peer
            ):
                self.termination.begin(now, 0.0)
        self.termination.step(now)
        # A torchrun that has just ended is no longer a descendant: `_reap` must journal its end first, in the next
        # turn. If torchrun itself survives SIGKILL, it has no end.
        is_torchrun_over = self.engine_code is not None or self.termination.survivors
        if self.termination.is_done and is_torchrun_over and self.final_at is None:
            self._finish(now)
        news = self.hardware.news()
        if news is not None and self.final_at is None:
            self.reader_table.tell(news)
        self.reader_table.send(now, self.final_at)

    def _let_pass(self, now: float) -> None:
        """Add up the time in which a rank of the job waits for the user's input."""
        is_elsewhere = self.channel is not None and self.channel.gang.has_paused_node
        if self.rank_table.has_paused or is_elsewhere:
            self.paused_s += now - self.ticked_at
        self.ticked_at = now

    def _touch(self) -> None:
        """Update the timestamps of this job's files, so that neither a contact nor a cleaner of /tmp removes them.

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
        """Recreate files that a cleaner of /tmp removed: notebooks and restarted ranks need them to find this agent."""
        # Another process has the name now, or the disk is full.
        with contextlib.suppress(OSError):
            if not self.run_dir.exists():
                places.make_run_dir(self.start.job, self.start.node_rank)
            places.check_run_dir(self.run_dir)
            if not (self.run_dir / places.READERS).exists():
                self.reader_table.listen(places.reader_listener(self.run_dir))
            if not (self.run_dir / places.RANKS).exists():
                self.rank_table.listen(str(self.run_dir / places.RANKS))
            if processes.noted(self.run_dir / places.PID) is None:
                processes.note(os.getpid(), self.run_dir / places.PID)

    def _stop_if_due(self, now: float) -> None:
        """Start the end for any of six causes. The first one counts, so their order matters within a turn."""
        # 1. SIGTERM: a user or a scheduler on this host ends the agent. The peers must report this node as the cause,
        # whatever else failed.
        if self.got_sigterm:
            cause = Cause("the agent was asked to end", self.start.node_rank)
            self.stop(now, cause)
        # 2. Peers come before this node's own ranks: when a peer fails, ranks of this node fail a moment later because
        # their connections break, and the user must see the first failure. Polled in every turn, even while this node
        # stops, because that also informs the peers.
        if self.channel is not None:
            peers_cause = self.channel.poll(
                now,
                self.cause,
                is_clear=self.final_at is not None,
                is_detached=self.lease.is_detached,
                has_returned=self.rank_table.have_all_returned,
                is_ending=self.final_at is None
                and self.polite_stop is not None
                and self.polite_stop.is_ending,
                is_paused=self.rank_table.has_paused,
                is_at_cell=self.rank_table.is_at_cell,
            )
            if self.channel.gang.is_detached:
                self._detach()
            leaves_as_expected = (
                self.final_at is not None
                and peers_cause is not None
                and peers_cause.reason == "lost"
            )
            if peers_cause is not None and not leaves_as_expected:
                self.stop(now, peers_cause)
            self._form_anew_if_asked(now, self.channel.gang.formations)
            self._leave_exit_barrier(now, may_leave_others=self.channel.gang.may_leave)
        # 3. A rank failed. torchrun ends the other ranks too, but gives them 30 s. If restarts are left, torchrun alone
        # decides.
        failed_at = self.rank_table.failed_at
        may_restart = self.start.terms.max_restarts > 0
        if (
            failed_at is not None
            and not may_restart
            and now - failed_at > _TORCHRUN_REPORT_S
        ):
            self.stop(now, Cause("failed", self.start.node_rank))
        if may_restart and self._waits_in_vain(now):
            self.stop(now, Cause("failed", self.start.node_rank))
        # 4, 5 and 6. Idle ranks, timeout and lease come last: a job that has just failed did not run too long. Once the
        # agents exchange heartbeats, only the lead has the lease, because the other agents need no connection to the
        # notebook.
        if self.start.lead and self.start.terms.ends_idle_s is not None:
            self._look_at_cells(now)
        if self.start.lead or self.channel is None or not self.channel.gang.has_formed:
            self._look_at_lease(now)

    def _form_anew_if_asked(self, now: float, formations: int) -> None:
        """Kill the ranks that would wait forever for a lost node; torchrun then starts new ranks with the others."""
        assert self.start.membership is not None
        if formations > self.formations and not self.termination.has_begun:
            self.formations = formations
            last_heard = now - self.start.membership.lost_after_s
            self.rank_table.kill_older(last_heard + _NO_NEW_ROUND_S)

    def _leave_exit_barrier(self, now: float, *, may_leave_others: bool) -> None:
        """End torchrun if all ranks of this node have returned, and it waits in vain for those of a lost node.

        It would wait 300 s (torch 2.13: `exit_barrier_timeout` in elastic/agent/server/api.py). The lead's torchrun has
        the store of the rendezvous, so it stays until the other nodes have ended.
        """
        has_lost_a_node = self.formations > 0
        if not has_lost_a_node or not self.rank_table.have_all_returned:
            return
        if self.start.lead and not may_leave_others:
            return
        if not self.termination.has_begun:
            self.has_left_barrier = True
            self.termination.begin(now, _LEFTOVER_GRACE_S)

    def _waits_in_vain(self, now: float) -> bool:
        """Whether this node must end because torchrun can't restart its ranks (see `RestartWait`).

        Never in an elastic job: whenever its nodes change, ranks are asked to end, so those of a healthy node may
        return.
        """
        if self.channel is None or self.start.terms.is_elastic:
            return False
        has_returned = self.channel.gang.has_returned_node
        return self.restart_wait.is_in_vain(
            now, self.rank_table.waits_since, has_returned_node=has_returned
        )

    def _look_at_cells(self, now: float) -> None:
        is_at_cell = self.rank_table.is_at_cell or (
            self.channel is not None and self.channel.gang.has_node_at_cell
        )
        if self.cell_wait.is_too_long(
            now,
            cells=self.rank_table.last_cell,
            is_at_cell=is_at_cell,
            has_notebook=not self.lease.has_run_out(now),
        ):
            self.stop(now, Cause("idle"))

    def _look_at_lease(self, now: float) -> None:
        timeout_s = self.start.terms.timeout_s
        if self.start.lead and timeout_s is not None:
            ran_s = now - self.began - self.paused_s
            if ran_s > timeout_s + _NOTEBOOK_FIRST_S:
                self.stop(now, Cause("timeout"))
        if self.lease.ends_job(now):
            self.stop(now, Cause("lease"))
        elif self.lease.has_run_out(now):
            self._detach("disconnected")

    def _detach(self, why: str = "") -> None:
        """Let the job run without a notebook, and list it as detached on this host.

        `why` is journaled; it is empty if the lead has decided it, because the lead's journal has it already.
        """
        if self.lease.detach():
            listing.mark_detached(self.folder)
            if why:
                self.journal.add(protocol.Detached(why=why))

    def _reap(self, now: float) -> None:
        """Collect ended children. If torchrun is among them, journal its end and start to end all processes."""
        status = processes.reap().get(self.engine_pid)
        self.rank_table.notice_ends()
        if status is None:
            return
        self.engine_code = (
            0 if self.has_left_barrier else os.waitstatus_to_exitcode(status)
        )
        if exit_codes.is_kill(self.engine_code):
            why = self.rank_table.memory.why(self.engine_cgroup)
            if why:
                self.journal.add(
                    protocol.Notice(text=f"its torchrun was killed: {why}")
                )
        # If a signal ended torchrun, stop this node alone: for the others of an elastic job that is a lost node.
        is_elastic = self.start.terms.is_elastic
        if (
            is_elastic
            and exit_codes.is_signal(self.engine_code)
            and not (self.start.lead or self.termination.has_begun)
        ):
            text = f"its torchrun was ended ({exit_codes.meaning_of(self.engine_code)}); the others continue without this node"
            self.journal.add(protocol.Notice(text=text))
            self.stop(now, Cause("lost", self.start.node_rank))
        # `EngineEnded` follows the ends of all ranks that are known so far; a reader need not wait for more after it.
        self.rank_table.end_by_torchrun_report()
        self.rank_table.write(now, last=True)
        self.journal.add(
            protocol.EngineEnded(
                code=self.engine_code, exits=self.rank_table.engine_exits
            )
        )
        self.rank_table.end_unreported(self.engine_code)
        if self.engine_code != 0 and not self._joined_in_vain():
            self.stop(now, Cause("failed", self.start.node_rank))
        # For processes that ranks left running; the job itself succeeded.
        self.termination.begin(now, _LEFTOVER_GRACE_S)

    def _joined_in_vain(self) -> bool:
        """Whether this node joined an elastic job late and never had a rank: its failure does not affect the job."""
        membership = self.start.membership
        return (
            membership is not None
            and self.start.node_rank >= membership.nodes
            and not self.rank_table.ranks
        )

    # ---- requests of readers

    def _handle(self, reader: Reader, request: protocol.Message, now: float) -> None:
        """Carry out a notebook's request. Each request renews the lease."""
        self.lease.renew(now)
        if isinstance(request, protocol.StopNode):
            reason = known_stop_reason(request.reason)
            # The sender has not yet received the events about ranks of this node.
            if reason == "too late" and self.rank_table.ranks:
                return
            self.stop(now, Cause(reason))
            # A second request may ask for the end at once.
            if reason != "failed" or self.last_calls_until is None:
                self.termination.begin(
                    now, request.grace_s, asks=self.polite_stop is None
                )
            self.stopped_by_notebook = True
        elif isinstance(request, protocol.DetachJob):
            self._detach("asked")
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
        has_returned_node = self.rank_table.have_all_returned or (
            self.channel is not None and self.channel.gang.has_returned_node
        )
        try:
            added = self.elastic_members.add(
                request,
                now,
                is_ending=self.termination.has_begun,
                has_returned_node=has_returned_node,
            )
        except ValueError as error:
            reader.answer(protocol.Refused(what="add_node", error=str(error)))
            return
        listing.note_hosts(self.folder, added.hosts)
        # An event, not an answer: all notebooks that follow the job need it.
        self.journal.add(added)

    # ---- end

    def stop(self, now: float, cause: Cause) -> None:
        """End every process, for the first cause: ask ranks to end by themselves, or send SIGTERM."""
        if self.cause is not None:
            return
        self.cause = cause
        self.journal.add(
            protocol.NodeStopping(reason=cause.reason, culprit=cause.culprit)
        )
        self.rank_table.end_input()
        # Otherwise torchrun had exited before, and the job was done.
        if self.termination.has_begun or self.final_at is not None:
            return
        self.reason = cause.reason
        ranks, torchrun = self.rank_table.ranks, processes.read(self.engine_pid)
        if cause.reason == "failed" and cause.culprit != self.start.node_rank:
            self.stack_dumper.ask_last(ranks)
            self.last_calls_until = now + _LAST_CALLS_S
            return
        if torchrun is None or not polite_stop.is_possible(cause.reason, ranks):
            self.termination.begin(now, _GRACE_S)
            return
        self.polite_stop = PoliteStop(self.run_dir, now)
        # torchrun forwards the signal to its ranks and their children.
        processes.send(torchrun, polite_stop.signal_for(cause.reason, ranks))
        self.termination.begin(now, self.start.terms.grace_s, asks=False)

    def _end_after_last_calls(self, now: float) -> None:
        if self.last_calls_until is None:
            return
        has_answers = self.stack_dumper.has_answers(self.rank_table.ranks)
        if has_answers or now > self.last_calls_until:
            self.last_calls_until = None
            self.termination.begin(now, _GRACE_S)

    def _finish(self, now: float) -> None:
        """Journal `Final`. Every process of the job has ended, except the survivors that it names."""
        self.rank_table.finish(now)
        for descriptor in self.devices:
            os.close(descriptor)
        # Before the notebook receives the end, and starts the next run.
        if self.start.work is not None:
            work_dirs.leave(
                Path(self.start.work.path), self.start.job, self.start.node_rank
            )
        self.journal.add(
            protocol.Final(reason=self.reason, survivors=self.termination.survivors)
        )
        self.final_at = now
        # From now on a contact finds no socket of this agent and reads the journal itself.
        shutil.rmtree(self.run_dir, ignore_errors=True)
