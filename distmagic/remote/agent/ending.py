"""Why and how a node ends: every decision to stop, and the steps until no process is left.

The package's `__init__` describes states and promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from distmagic.remote.agent import polite_stop
from distmagic.remote.agent.patience import CellWait, Lease, RestartWait
from distmagic.remote.agent.polite_stop import PoliteStop
from distmagic.remote.agent.rank_table import RankTable
from distmagic.remote.agent.stack_dump import StackDumper
from distmagic.remote.agent.termination import Termination
from distmagic.remote.gang.channel import Cause, GangChannel
from distmagic.remote.gang.datagrams import OwnState
from distmagic.remote.gang.liveness import ALONE, Gang
from distmagic.remote.records import listing, places
from distmagic.remote.records.journal import Journal
from distmagic.remote.system import processes
from distmagic.remote.wire import protocol
from distmagic.remote.wire.vocabulary import StopReason, known_stop_reason

LEFTOVER_GRACE_S = 1.0  # for processes that ranks left running when torchrun exited
# Time after the last datagram of a lost node: ranks that start in this time still try to meet it.
# torchrun forms a round without it after its `last_call_timeout` of 5 s at the earliest.
_NO_NEW_ROUND_S = 3.0
_GRACE_S = 3.0  # between SIGTERM and SIGKILL, after a failure or a loss
# Time after the timeout: a notebook that follows the job stops all nodes at once, which is better.
# Before that it may ask ranks for their stacks, which takes up to 6 s.
_NOTEBOOK_FIRST_S = 7.0
_TORCHRUN_REPORT_S = 0.5  # for torchrun to report exit codes after a rank has failed
# time for ranks to write their collective calls, before they are ended because a rank of another
# node has failed
_LAST_CALLS_S = 1.0


@dataclass(eq=False)
class NodeEnd:
    """The end of one node."""

    start: protocol.StartNode
    journal: Journal
    rank_table: RankTable
    stack_dumper: StackDumper
    _began: float
    channel: GangChannel | None = None  # leads to its peers, if there is one
    engine_pid: int = 0  # torchrun's
    termination: Termination = field(default_factory=Termination)
    reason: StopReason | Literal["done"] = "done"  # goes into `Final`
    cause: Cause | None = None  # why this node stops, if it does; sent to the peers
    final_at: float | None = None  # when `Final` was written
    got_sigterm: bool = False  # set by the signal handler, and acted on by `step`
    # the notebook then stops the peers too, so they need no heartbeat about it
    stopped_by_notebook: bool = False
    # torchrun was ended while it waited for a lost node, and all ranks of this node had succeeded
    has_left_barrier: bool = False
    _polite_stop: PoliteStop | None = None
    _last_calls_until: float | None = None  # the end waits for ranks' calls
    # The number of restarts of all ranks that the lead has requested and this node has done.
    _formations: int = 0
    _restart_wait: RestartWait = field(default_factory=RestartWait)
    _paused_s: float = 0.0  # how long a rank of the job has waited for the user's input

    def __post_init__(self) -> None:
        terms, now = self.start.terms, self._began
        self.lease = Lease(now, terms.lease_s, keep=terms.goes_on_alone)
        self._cell_wait = CellWait(now, terms.ends_idle_s)
        self._stepped_at = now

    @property
    def gang(self) -> Gang:
        """The heartbeats of this node and its peers; no peers without a channel."""
        return ALONE if self.channel is None else self.channel.gang

    def step(self, now: float) -> None:
        """Do everything that is due: decide whether to stop, and continue with the end."""
        if self.rank_table.has_paused or self.gang.has_paused_node:
            self._paused_s += now - self._stepped_at
        self._stepped_at = now
        self._stop_if_due(now)
        if self._last_calls_until is not None and (
            self.stack_dumper.has_answers(self.rank_table.ranks)
            or now > self._last_calls_until
        ):
            self._last_calls_until = None
            self.termination.begin(now, _GRACE_S)
        if self._polite_stop is not None and self._polite_stop.look(
            self.rank_table.ranks, now, has_ending_peer=self.gang.has_ending_node
        ):
            self.termination.begin(now, 0.0)
        self.termination.step(now)

    # ---- decisions

    def _stop_if_due(self, now: float) -> None:
        """Start the end for any of six causes.

        The first one counts, so their order matters within a turn.
        """
        # 1. SIGTERM: a user or a scheduler on this host ends the agent. The peers must report this
        # node as the cause, whatever else failed.
        if self.got_sigterm:
            cause = Cause("the agent was asked to end", self.start.node_rank)
            self.stop(now, cause)
        # 2. Peers come before this node's own ranks: when a peer fails, ranks of this node fail a
        # moment later because their connections break, and the user must see the first failure.
        # Polled in every turn, even while this node stops, because that also informs the peers.
        if self.channel is not None:
            is_clear = self.final_at is not None
            own = OwnState(
                is_detached=self.lease.is_detached,
                has_returned=self.rank_table.have_all_returned,
                is_ending=not is_clear
                and self._polite_stop is not None
                and self._polite_stop.is_ending,
                is_paused=self.rank_table.has_paused,
                is_at_cell=self.rank_table.is_at_cell,
            )
            peers_cause = self.channel.poll(now, own, self.cause, is_clear=is_clear)
            if self.gang.is_detached:
                self.detach()
            # Peers leave once this node is clear.
            if peers_cause is not None and not (
                is_clear and peers_cause.reason == "lost"
            ):
                self.stop(now, peers_cause)
            self._form_anew_if_asked(now, self.gang.formations)
            self._leave_exit_barrier(now)
        # 3. A rank failed. torchrun ends the other ranks too, but gives them 30 s. If restarts are
        # left, torchrun alone decides.
        failed_at = self.rank_table.failed_at
        may_restart = self.start.terms.may_restart
        if (
            failed_at is not None
            and not may_restart
            and now - failed_at > _TORCHRUN_REPORT_S
        ):
            self.stop(now, Cause("failed", self.start.node_rank))
        # Or torchrun can't restart its ranks (see `RestartWait`). Never in an elastic job: whenever
        # its nodes change, ranks are asked to end, so those of a healthy node may return.
        may_wait = may_restart and not self.start.terms.is_elastic
        if may_wait and self._restart_wait.is_in_vain(
            now,
            self.rank_table.waits_since,
            has_returned_node=self.gang.has_returned_node,
        ):
            self.stop(now, Cause("failed", self.start.node_rank))
        # 4, 5 and 6. Idle ranks, timeout and lease come last: a job that has just failed did not
        # run too long. Once the agents exchange heartbeats, only the lead has the lease, because
        # the other agents need no connection to the notebook.
        if self.start.lead and self.start.terms.ends_idle_s is not None:
            self._look_at_cells(now)
        if self.start.lead or not self.gang.has_formed:
            self._look_at_lease(now)

    def _form_anew_if_asked(self, now: float, formations: int) -> None:
        """Kill the ranks that would wait forever for a lost node; torchrun then starts new ranks
        with the others.
        """
        assert self.start.membership is not None
        if formations > self._formations and not self.termination.has_begun:
            self._formations = formations
            last_heard = now - self.start.membership.lost_after_s
            self.rank_table.kill_older(last_heard + _NO_NEW_ROUND_S)

    def _leave_exit_barrier(self, now: float) -> None:
        """End torchrun if all ranks of this node have returned, and it waits in vain for those of a
        lost node.

        It would wait 300 s (torch 2.13: `exit_barrier_timeout` in elastic/agent/server/api.py). The
        lead's torchrun has the store of the rendezvous, so it stays until the other nodes have
        ended.
        """
        has_lost_a_node = self._formations > 0
        if not has_lost_a_node or not self.rank_table.have_all_returned:
            return
        if self.start.lead and not self.gang.may_leave:
            return
        if not self.termination.has_begun:
            self.has_left_barrier = True
            self.termination.begin(now, LEFTOVER_GRACE_S)

    def _look_at_cells(self, now: float) -> None:
        if self._cell_wait.is_too_long(
            now,
            cells=self.rank_table.last_cell,
            is_at_cell=self.rank_table.is_at_cell or self.gang.has_node_at_cell,
            has_notebook=not self.lease.has_run_out(now),
        ):
            self.stop(now, Cause("idle"))

    def _look_at_lease(self, now: float) -> None:
        timeout_s = self.start.terms.timeout_s
        if self.start.lead and timeout_s is not None:
            ran_s = now - self._began - self._paused_s
            if ran_s > timeout_s + _NOTEBOOK_FIRST_S:
                self.stop(now, Cause("timeout"))
        if self.lease.ends_job(now):
            self.stop(now, Cause("lease"))
        elif self.lease.has_run_out(now):
            self.detach("disconnected")

    def detach(self, why: str = "") -> None:
        """Let the job run without a notebook, and list it as detached on this host.

        `why` is journaled; it is empty if the lead has decided it, because the lead's journal has
        it already.
        """
        if self.lease.detach():
            listing.mark_detached(self.journal.folder)
            if why:
                self.journal.add(protocol.Detached(why=why))

    # ---- the end

    def obey(self, request: protocol.StopNode, now: float) -> None:
        """Stop because a notebook requests it."""
        reason = known_stop_reason(request.reason)
        # The sender has not yet received the events about ranks of this node.
        if reason == "too late" and self.rank_table.ranks:
            return
        self.stop(now, Cause(reason))
        # A second request may ask for the end at once.
        if reason != "failed" or self._last_calls_until is None:
            self.termination.begin(now, request.grace_s, asks=self._polite_stop is None)
        self.stopped_by_notebook = True

    def stop(self, now: float, cause: Cause) -> None:
        """End every process, for the first cause: ask ranks to end by themselves, or send
        SIGTERM.
        """
        if self.cause is not None:
            return
        self.cause = cause
        # Ranks that have died before come first in the journal.
        self.rank_table.read_reports()
        self.rank_table.notice_ends()
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
            self._last_calls_until = now + _LAST_CALLS_S
            return
        if torchrun is None or not polite_stop.is_possible(cause.reason, ranks):
            self.termination.begin(now, _GRACE_S)
            return
        self._polite_stop = PoliteStop(
            places.run_dir(self.start.job, self.start.node_rank), now
        )
        # torchrun forwards the signal to its ranks and their children.
        processes.send(torchrun, polite_stop.signal_for(cause.reason, ranks))
        self.termination.begin(now, self.start.terms.grace_s, asks=False)
