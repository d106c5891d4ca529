"""The agent's side of the heartbeats: sends and receives them, journals changes, decides when to
stop.
"""

from __future__ import annotations

import selectors
from dataclasses import dataclass, replace

from distmagic.remote.gang import liveness
from distmagic.remote.gang.datagrams import NOBODY, OwnState
from distmagic.remote.gang.liveness import News
from distmagic.remote.gang.udp import Udp, resolve
from distmagic.remote.records.journal import Journal
from distmagic.remote.wire import protocol
from distmagic.remote.wire.vocabulary import StopReason


@dataclass(frozen=True)
class Cause:
    """Why a node ends its ranks. `culprit` is the node that caused it, -1 for none."""

    reason: StopReason
    culprit: int = -1


class GangChannel:
    """The heartbeats of one agent, for the agent's whole life.

    The agent calls `poll` in every turn of its loop, and reads the state of peers from `gang`.
    Raises OSError if no socket is available.
    """

    def __init__(
        self,
        node_rank: int,
        membership: protocol.Membership,
        min_nodes: int,
        journal: Journal,
        now: float,
    ) -> None:
        self._min_nodes = min_nodes
        self._journal = journal
        self._is_lead = node_rank == 0
        self._lost_after_s = membership.lost_after_s
        self._lost: set[int] = set()  # nodes that count as lost
        self._back_at: dict[int, float] = {}  # when heartbeats of some of them returned
        # How often this node, as the lead, has asked all nodes to restart their ranks.
        self._formations = 0
        port = membership.port if self._is_lead else 0
        self._udp = Udp(membership.address, port, reserved=membership.port)
        secret = bytes.fromhex(membership.secret)
        lost_after_s = membership.lost_after_s
        if self._is_lead:
            self.gang = liveness.lead(secret, membership.nodes, lost_after_s, now)
        else:
            lead_address = resolve(membership.lead_address, membership.port)[4]
            self.gang = liveness.member(
                secret, node_rank, lead_address, lost_after_s, now
            )

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Let every datagram wake the agent's loop, which then calls `poll`."""
        selector.register(self._udp.socket, selectors.EVENT_READ, lambda: None)

    def poll(
        self, now: float, own: OwnState, cause: Cause | None, *, is_clear: bool
    ) -> Cause | None:
        """Receive and send datagrams.

        Return why this node must stop, if a peer's end or loss demands it. `own` is this node's
        state, without what this function adds: formations, phase, reason and culprit. `cause` is
        why this node itself is stopping, None while it is not. `is_clear`: none of its processes is
        left.
        """
        for data, address in self._udp.receive():
            self.gang.receive(data, address, now)
        own = replace(own, formations=self._formations)
        if cause is not None:
            culprit = cause.culprit if cause.culprit >= 0 else NOBODY
            own = replace(own, phase="stopping", reason=cause.reason, culprit=culprit)
        if is_clear:
            own = replace(own, phase="clear")
        self.gang.announce(own, now)
        # Each is journaled, even after the first cause.
        causes = [self._judge(news, now) for news in self.gang.poll(now)]
        self._udp.send(self.gang.outbox)
        return next((found for found in causes if found is not None), None)

    def _judge(self, news: News, now: float) -> Cause | None:
        """Journal a peer's new state.

        Return why this node must stop for it, None if it need not.
        """
        node = news.node_rank
        is_counted = node in self._lost and node not in self._back_at
        if news.kind != "stops":
            self._journal.add(protocol.PeerState(node_rank=node, state=news.kind))
            if news.kind == "back":
                self._back_at[node] = now
            # A peer that reported losing this node was already counted then.
            is_new = news.kind == "lost" and not is_counted
            return self._lose(node) if is_new else None
        if self._is_lead and news.reason == "lost":
            # This member has lost this node, perhaps while it was frozen: it counts as lost, once.
            # After its heartbeats have returned, it reports the same loss until it can have noticed
            # another one.
            if (
                node in self._lost
                and now - self._back_at.get(node, now) < self._lost_after_s
            ):
                self._back_at.pop(node, None)
                return None
            return self._lose(node)
        if not news.reason:
            return None
        return Cause(news.reason, -1 if news.culprit == NOBODY else news.culprit)

    def _lose(self, node_rank: int) -> Cause | None:
        """Count a node as lost.

        Return a cause if the job can't continue without it; else make the others restart their
        ranks.
        """
        self._lost.add(node_rank)
        self._back_at.pop(node_rank, None)
        if not self._is_lead or self.gang.alive_count < self._min_nodes:
            return Cause("lost", node_rank)
        self._formations += 1
        return None
