"""The agent's end of the gang channel: carries datagrams, journals news of other nodes, and says when to stop for them."""

from __future__ import annotations

import contextlib
import selectors
from dataclasses import dataclass

from distmagic.remote.gang import liveness
from distmagic.remote.gang.datagrams import NOBODY
from distmagic.remote.gang.liveness import Gang, News, Own
from distmagic.remote.gang.udp import Udp, resolve
from distmagic.remote.records.journal import Journal
from distmagic.remote.wire import protocol
from distmagic.remote.wire.vocabulary import StopReason


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a node's ranks are ended; `culprit` is the node because of which, -1 for none."""

    reason: StopReason
    culprit: int = -1


class GangChannel:
    """Open while the agent lives. `poll` is called all the time."""

    def __init__(
        self, node_rank: int, membership: protocol.Membership, min_nodes: int, journal: Journal, now: float
    ) -> None:
        self._min_nodes, self._journal = min_nodes, journal
        self._is_lead = node_rank == 0
        self._lost: set[int] = set()  # nodes that were lost, whether or not they came back
        self._asked = 0  # how often that was
        self._udp = Udp(membership.address, membership.port if self._is_lead else 0)
        self._gang = _gang(node_rank, membership, now)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Wake the agent's loop at every datagram."""
        selector.register(self._udp.socket, selectors.EVENT_READ, lambda: None)

    @property
    def has_formed(self) -> bool:
        """Whether another node has been heard, and is not lost."""
        return self._gang.has_formed

    @property
    def may_leave(self) -> bool:
        """Whether nobody needs this agent any more."""
        return self._gang.may_leave

    def stands(self, node_rank: int) -> bool | None:
        """Whether the lead hears a node, and it hasn't ended; None for one that it has never heard."""
        return self._gang.stands(node_rank)

    @property
    def formations(self) -> int:
        """How often the lead has asked the nodes to form anew, because one of them was lost."""
        return self._gang.formations

    def poll(self, now: float, cause: Cause | None, *, is_clear: bool) -> Cause | None:
        """Take and send what is due; return why this node must stop, if another one's end or loss asks for that.

        `cause` is why this node stops itself, `is_clear` whether all of its processes are gone.
        """
        for data, address in self._udp.receive():
            self._gang.hear(data, address, now)
        phase = "clear" if is_clear else "stopping" if cause else "up"
        culprit = cause.culprit if cause and cause.culprit >= 0 else NOBODY
        reason = cause.reason if cause else ""
        self._gang.say(Own(phase=phase, reason=reason, culprit=culprit, formations=self._asked), now)
        found = [self._judge(news) for news in self._gang.poll(now)]
        self._udp.send(self._gang.outbox)
        return next((one for one in found if one is not None), None)

    def _judge(self, news: News) -> Cause | None:
        if news.what != "stops":
            self._journal.add(protocol.PeerState(node_rank=news.node_rank, state=news.what))
        if news.what == "lost":
            return self._lose(news.node_rank)
        if (
            news.what == "stops" and self._is_lead and news.reason == "lost"
        ):  # one that was frozen says so when it is back
            return None if news.node_rank in self._lost else self._lose(news.node_rank)
        if news.what == "stops" and news.reason:
            return Cause(news.reason, -1 if news.culprit == NOBODY else news.culprit)
        return None

    def _lose(self, node_rank: int) -> Cause | None:
        """Take that a node is not heard any more, or ends as one that is lost: the others form anew, or end too."""
        self._lost.add(node_rank)
        if not self._can_go_on():
            return Cause("lost", node_rank)
        self._asked += 1
        return None

    def _can_go_on(self) -> bool:
        """Whether an elastic job is large enough without the lost ones. Without the lead there is no job."""
        return self._is_lead and self._gang.alive >= self._min_nodes

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._udp.socket.close()


def _gang(node_rank: int, membership: protocol.Membership, now: float) -> Gang:
    secret, lost_after_s = bytes.fromhex(membership.secret), membership.lost_after_s
    if node_rank == 0:
        return liveness.lead(secret, membership.nodes, lost_after_s, now)
    lead_address = resolve(membership.lead_address, membership.port)[4]
    return liveness.member(secret, node_rank, lead_address, lost_after_s, now)
