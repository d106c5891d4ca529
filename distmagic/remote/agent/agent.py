"""The agent: one per node of a job, in its own session. Starts torchrun, gathers what ranks say, ends everything.

One thread and one loop; nothing in it blocks. Its standard input says what to start (a `StartNode` line); its argument is
the number of the listening socket of its readers, made by `contact`.
"""

from __future__ import annotations

import math
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Literal

from distmagic.remote.agent.endpoint import Dialer
from distmagic.remote.agent.lease import Lease
from distmagic.remote.agent.rank_stream import RankStream
from distmagic.remote.agent.rank_table import RankTable
from distmagic.remote.agent.readers import Reader
from distmagic.remote.agent.stack_dump import StackDumper
from distmagic.remote.agent.termination import Termination
from distmagic.remote.engine import engine, engine_start
from distmagic.remote.gang.channel import Cause, GangChannel
from distmagic.remote.gang.elastic_members import ElasticMembers
from distmagic.remote.records import listing, places
from distmagic.remote.records.journal import FILE, Journal
from distmagic.remote.system import exit_codes, memory, processes, socket_peer
from distmagic.remote.wire import protocol
from distmagic.remote.wire.vocabulary import StopReason, known_stop_reason

_TICK_S = 0.05
_TOUCH_S = 30.0
_LEFTOVER_GRACE_S = 1.0  # for what ranks left running when torchrun is over
_GRACE_S = 3.0  # between SIGTERM and SIGKILL, when no notebook says how long
_NOTEBOOK_FIRST_S = 1.0  # a notebook that is there stops the job in time itself
_GOODBYE_S = 2.0  # for the other nodes to hear of the end, where the notebook tells them too
_TORCHRUN_TELLS_S = 0.5  # after a rank has failed: what torchrun knows of it


class Agent:
    """All of one node's job. `run` returns when nothing of it is left but this process."""

    def __init__(self, start: protocol.StartNode, listener: socket.socket, clock: Callable[[], float]) -> None:
        self.start, self.clock = start, clock
        self.folder = places.job_dir(start.job, start.node_rank)
        self.run_dir = places.run_dir(start.job, start.node_rank)
        self.journal = Journal(self.folder)
        self.selector = selectors.DefaultSelector()
        self.roster = RankTable(self.folder, self.journal, self.selector, clock)
        self.roll_call = StackDumper(self.run_dir, places.blob(start.code), sys.path[0], self.journal)
        self.ending = Termination()
        self.readers: list[Reader] = []
        self.engine_pid = 0
        self.engine: tuple[processes.ProcessInfo | None, memory.Cgroup]
        self.engine_code: int | None = None
        self.reason: StopReason | Literal["done"] = "done"
        self.cause: Cause | None = None
        self.is_asked_to_end = self.is_final = False
        self.is_stopped_by_notebook = False
        self.goodbye_until = math.inf
        self.formations = 0
        self.dialer: Dialer | None = None
        self.channel: GangChannel | None = None
        self.muster = ElasticMembers(start, self._stands, clock())
        self.lease = Lease(clock(), start.terms.lease_s, keep=start.terms.goes_on_alone)
        self.began = self.touch_at = clock()
        self.umask = os.umask(0o077)  # the user's own, for the ranks; what this process makes is nobody else's business
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, lambda: self._accept_reader(listener))
        self.roster.listen(str(self.run_dir / "ranks"))

    # ---- beginning

    def begin(self) -> None:
        """Start torchrun and tell it."""
        self.journal.add(
            protocol.Hello(
                protocol=protocol.PROTOCOL, job=self.start.job, node_rank=self.start.node_rank,
                hostname=socket.gethostname(), pid=os.getpid(),
            )
        )  # fmt: skip
        self._join_gang()
        env = engine.environment(self.start, dict(os.environ), self.folder, self.run_dir)
        self.engine_pid, *pipes = engine_start.start_engine(self.start.torchrun, self.start.cwd, env, self.umask)
        self.engine = processes.read(self.engine_pid), memory.Cgroup(self.engine_pid)
        for fd, name in zip(pipes, ("stdout", "stderr"), strict=True):
            self.roster.add_stream(RankStream(fd, self.folder, -1, name, self.clock()))
        if self.start.endpoint:
            address, port = self.start.endpoint.split()
            self.dialer = Dialer(address, int(port), lead=self.start.lead, now=self.clock())

    def _join_gang(self) -> None:
        membership, min_nodes = self.start.membership, self.start.terms.min_nodes
        if membership is None:
            return
        try:
            self.channel = GangChannel(self.start.node_rank, membership, min_nodes, self.journal, self.clock())
            self.channel.watch(self.selector)
        except OSError as error:
            text = f"no channel to the other hosts at {membership.address}: {error}"
            self.journal.add(protocol.Notice(text=text))

    def _stands(self, node_rank: int) -> bool | None:
        return self.channel.stands(node_rank) if self.channel is not None else None

    # ---- the loop

    def run(self) -> None:
        """Go on until the job is over and every reader has been told, or nobody holds the lease."""
        while not self._may_go():
            for key, _ in self.selector.select(_TICK_S):
                key.data()
            self._tick(self.clock())

    def _may_go(self) -> bool:
        is_late = self.is_stopped_by_notebook and self.clock() > self.goodbye_until
        if not self.is_final or not (self.channel is None or self.channel.may_leave or is_late):
            return False
        told = all(reader.has_all(self.journal) for reader in self.readers)
        return told or self.lease.has_run_out(self.clock())

    def _tick(self, now: float) -> None:
        self._reap(now)
        if self.dialer is not None and (found := self.dialer.poll(now)) is not None:
            self.journal.add(found)
        self.roster.write(now)
        self.roll_call.step(now, self.roster.ranks)
        self.roster.forget_gone(now)
        if not self.ending.has_begun:
            self.roster.notice_lingering(now)
        if now >= self.touch_at:
            self.touch_at = now + _TOUCH_S
            payload = (self.start.call, self.start.code, *self.start.side_files)
            places.touch((self.folder / FILE, *map(places.blob, payload), sys.path[0]))
            # Without its sockets nobody can reach this agent, and a cleaner of /tmp removes what nobody touches.
            places.touch((self.run_dir, self.run_dir / "readers", self.run_dir / "ranks"))
        self._stop_if_due(now)
        self.ending.step(now)
        if self.ending.is_done and not self.is_final and (self.engine_code is not None or self.ending.survivors):
            self._finish(now)
        for reader in self.readers:
            reader.send(self.journal)
        for reader in [reader for reader in self.readers if not reader.is_open]:
            self._drop_reader(reader)

    def _stop_if_due(self, now: float) -> None:
        if self.is_asked_to_end:
            self.stop(now, _GRACE_S, Cause("the agent was asked to end", self.start.node_rank))
        if self.channel is not None:
            cause = self.channel.poll(now, self.cause, is_clear=self.is_final)
            if cause is not None and not (self.is_final and cause.reason == "lost"):  # who leaves first is not lost
                self.stop(now, _GRACE_S, cause)
            self._form_anew_if_asked(now, self.channel.formations)
        failed_at = self.roster.failed_at
        if failed_at is not None and not self.start.terms.max_restarts and now - failed_at > _TORCHRUN_TELLS_S:
            self.stop(now, _GRACE_S, Cause("failed", self.start.node_rank))
        if self.start.lead or self.channel is None or not self.channel.has_formed:  # else the lead has the lease
            self._look_at_lease(now)

    def _form_anew_if_asked(self, now: float, formations: int) -> None:
        """End the ranks that wait for a lost node, as they would for ever: torchrun starts them again without it."""
        assert self.start.membership is not None
        if formations > self.formations and not self.ending.has_begun:
            self.formations = formations
            self.roster.end_older(now - self.start.membership.lost_after_s)

    def _look_at_lease(self, now: float) -> None:
        timeout_s = self.start.terms.timeout_s
        if self.start.lead and timeout_s is not None and now - self.began > timeout_s + _NOTEBOOK_FIRST_S:
            self.stop(now, _GRACE_S, Cause("timeout"))
        if self.lease.ends_job(now):
            self.stop(now, _GRACE_S, Cause("lease"))
        elif self.lease.has_run_out(now):
            self._detach("disconnected")

    def _detach(self, why: str) -> None:
        if self.lease.detach():
            listing.mark_detached(self.folder)
            self.journal.add(protocol.Detached(why=why))

    def _reap(self, now: float) -> None:
        status = processes.reap().get(self.engine_pid)
        self.roster.notice_ends()
        if status is not None:
            self.engine_code = exit_codes.code_of(status)
            if exit_codes.is_kill(self.engine_code) and (why := self.roster.memory.why(*self.engine)):
                self.journal.add(protocol.Notice(text=f"its torchrun was killed: {why}"))
            self._leave_if_killed(now, self.engine_code)
            self.roster.end_as_torchrun_tells()
            self.roster.write(now, last=True)
            self.journal.add(protocol.EngineEnded(code=self.engine_code, exits=self.roster.engine_exits))
            self.roster.end_untold(self.engine_code)
            if self.engine_code != 0 and not self._came_in_vain():
                self.stop(now, _LEFTOVER_GRACE_S, Cause("failed", self.start.node_rank))
            self.ending.begin(now, _LEFTOVER_GRACE_S)

    def _leave_if_killed(self, now: float, code: int) -> None:
        """End this node alone where somebody has killed its torchrun: the others of an elastic job go on as after a loss."""
        if (
            self.start.terms.is_elastic
            and exit_codes.is_signal(code)
            and not (self.start.lead or self.ending.has_begun)
        ):
            text = f"its torchrun was ended ({exit_codes.meaning_of(code)}); the others go on without this node"
            self.journal.add(protocol.Notice(text=text))
            self.stop(now, _LEFTOVER_GRACE_S, Cause("lost", self.start.node_rank))

    def _came_in_vain(self) -> bool:
        """Whether this host wanted to join an elastic job and never had a rank: the others go on, or are done."""
        membership = self.start.membership
        return membership is not None and self.start.node_rank >= membership.nodes and not self.roster.ranks

    # ---- readers

    def _accept_reader(self, listener: socket.socket) -> None:
        conn, _ = listener.accept()
        if not socket_peer.is_ours(conn):
            conn.close()
            return
        reader = Reader(conn)
        self.readers.append(reader)
        self.selector.register(conn, selectors.EVENT_READ, lambda: self._obey(reader))

    def _obey(self, reader: Reader) -> None:
        now = self.clock()
        for request in reader.receive(self.journal.last):
            self.lease.renew(now)
            if isinstance(request, protocol.StopNode):
                self.stop(now, request.grace_s, Cause(known_stop_reason(request.reason)))
                self.is_stopped_by_notebook = True
            elif isinstance(request, protocol.DetachJob):
                self._detach("asked")
            elif isinstance(request, protocol.DumpStacks):
                self.roll_call.ask(request.request_id)
            elif isinstance(request, protocol.GetStart | protocol.AddNode):
                self._admit(reader, request, now)
        if not reader.is_open:
            self._drop_reader(reader)

    def _admit(self, reader: Reader, request: protocol.GetStart | protocol.AddNode, now: float) -> None:
        """Tell a notebook what it needs to start one more node, or count that node."""
        if isinstance(request, protocol.GetStart):
            reader.tell(protocol.LeadStart(start=self.start))
            return
        try:
            enlisted = self.muster.enlist(request, now, is_ending=self.ending.has_begun)
            listing.enlisted(self.folder, enlisted.hosts)
            self.journal.add(enlisted)
        except ValueError as error:
            reader.tell(protocol.Refused(what="add_node", error=str(error)))

    def _drop_reader(self, reader: Reader) -> None:
        if reader in self.readers:
            self.readers.remove(reader)
            self.selector.unregister(reader.conn)
            reader.close()

    # ---- the end

    def stop(self, now: float, grace_s: float, cause: Cause) -> None:
        """End everything: SIGTERM, and SIGKILL after `grace_s`. The first cause counts, and the other nodes hear of it."""
        if self.cause is None:
            self.cause = cause
            self.journal.add(protocol.NodeStopping(reason=cause.reason, culprit=cause.culprit))
        if not self.is_final:
            self.reason = self.reason if self.ending.has_begun else cause.reason
            self.ending.begin(now, grace_s)

    def _finish(self, now: float) -> None:
        """Say the last word: every process of the job is gone, but for survivors that are named."""
        self.roster.finish(now)
        self.journal.add(protocol.Final(reason=self.reason, survivors=self.ending.survivors))
        self.is_final = True
        self.goodbye_until = now + _GOODBYE_S
        shutil.rmtree(self.run_dir, ignore_errors=True)


def main(argv: list[str]) -> None:
    """Read a `StartNode` line from stdin and be its agent."""
    start = protocol.decode(sys.stdin.buffer.readline())[1]
    assert isinstance(start, protocol.StartNode)
    serve(start, socket.socket(fileno=int(argv[0])))


def serve(start: protocol.StartNode, listener: socket.socket) -> None:
    """Be the agent of one node, from beginning to end; its readers come to `listener`."""
    os.environ.pop("DISTMAGIC_WORKER", None)
    processes.become_subreaper()
    agent, pid = Agent(start, listener, time.monotonic), os.getpid()
    signal.signal(signal.SIGTERM, lambda *_: setattr(agent, "is_asked_to_end", True))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop
    signal.set_wakeup_fd(_wakeup(agent.selector), warn_on_full_buffer=False)
    try:
        agent.begin()
        agent.run()
    finally:
        if os.getpid() == pid:  # not the engine, forked in the middle of it
            shutil.rmtree(agent.run_dir, ignore_errors=True)
    os._exit(0)


def _wakeup(selector: selectors.BaseSelector) -> int:
    """Return the writing end of a pipe whose other end wakes the loop at a signal."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    selector.register(reading, selectors.EVENT_READ, lambda: os.read(reading, 4096))
    return writing
