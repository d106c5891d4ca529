"""Who of a job's nodes is alive, as the nodes find out among themselves: the lead hears every member, each member the lead.

    member  --up, stopping, clear-->  lead  --up, stopping, clear-->  every member

A node that stops says so until it is heard, and the lead passes it on. A peer that has been heard and is then silent
for `lost_after_s` is lost. One that is never heard (a firewall that lets no UDP through) is only told as silent: then
each node is under its own lease. Pure but for the clock's readings, which come in by argument; `udp.py` has the socket.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from distmagic.remote.gang.datagrams import NOBODY, Datagram, seal, unseal
from distmagic.remote.wire.vocabulary import StopReason

PERIOD_S = 0.5
MOST_NODES = 4096
FORM_S = 20.0  # a peer that hasn't been heard this long after the beginning is silent
_REMEMBERED = 128  # datagrams sent, whose time is known when they are echoed

Address = Any  # as sockets have it


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Something about a peer: "joined", "silent", "lost", "back", or "stops" for this `reason` because of `culprit`."""

    what: str
    node_rank: int
    reason: StopReason | Literal[""] = ""
    culprit: int = NOBODY


@dataclass(slots=True)
class Own:
    """What this node says of itself."""

    phase: str = "up"
    reason: StopReason | Literal[""] = ""
    culprit: int = NOBODY
    formations: int = 0


class Peer:
    """What is known of one other node. `formations`: how often the lead has asked to form anew, as it says."""

    def __init__(self, node_rank: int, address: Address | None, now: float) -> None:
        self.node_rank, self.address = node_rank, address
        self.began = self.arrived_at = now
        self.heard_at: float | None = None
        self.last_counter = self.sent_counter = 0
        self.phase, self.culprit, self.formations = "up", NOBODY, 0
        self.reason: StopReason | Literal[""] = ""
        self.state = ""  # "", joined, silent or lost: as last told
        self.acknowledged = 0  # the highest counter of ours that it has echoed
        self.cleared_by = 0  # the counter with which we said clear first
        self._sent: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def next_counter(self, now: float) -> int:
        """Return the number of the next datagram to it."""
        self.sent_counter += 1
        self._sent.append((self.sent_counter, now))
        return self.sent_counter

    def hear(self, one: Datagram, address: Address, now: float) -> bool:
        """Take its word, unless it is a replay; return whether it was taken."""
        if one.counter <= self.last_counter or one.echo > self.sent_counter:
            return False
        self.last_counter, self.address, self.arrived_at = one.counter, address, now
        self.phase, self.reason, self.culprit, self.formations = one.phase, one.reason, one.culprit, one.formations
        self.acknowledged = max(self.acknowledged, one.echo)
        for counter, at in self._sent:
            if counter == one.echo:  # it was alive when it heard this, or later
                self.heard_at = max(self.heard_at or at, at)
        return True

    def knows_clear(self) -> bool:
        """Whether it has heard that nothing is left here."""
        return bool(self.cleared_by) and self.acknowledged >= self.cleared_by


@dataclass(slots=True)
class Gang:
    """One node's part of the gang channel. `outbox` fills with (address, bytes) to be sent."""

    node_rank: int
    secret: bytes = field(repr=False)
    lost_after_s: float
    peers: dict[int, Peer]
    own: Own = field(default_factory=Own)
    outbox: list[tuple[Address, bytes]] = field(default_factory=list)
    send_at: float = 0.0
    now: float = 0.0

    @property
    def has_formed(self) -> bool:
        """Whether any peer has been heard, and is not lost."""
        return any(peer.state == "joined" for peer in self.peers.values())

    @property
    def alive(self) -> int:
        """How many nodes, this one among them, are heard and have not ended."""
        return 1 + sum(peer.state == "joined" and peer.phase == "up" for peer in self.peers.values())

    def stands(self, node_rank: int) -> bool | None:
        """Whether the lead hears a node, and it hasn't ended; None for one that it has never heard."""
        peer = self.peers.get(node_rank)
        if peer is None or not peer.last_counter:
            return None
        return peer.state != "lost" and peer.phase != "clear"

    @property
    def formations(self) -> int:
        """How often the lead has asked the nodes to form anew."""
        return self.peers[0].formations if self.node_rank else self.own.formations

    @property
    def may_leave(self) -> bool:
        """Whether all who were heard and aren't lost know that nothing is left here; the lead waits for their end too."""
        there = [peer for peer in self.peers.values() if peer.state in ("", "joined")]
        if self.node_rank == 0:  # one that was heard only once, in a short job, has heard us too
            return all(peer.phase == "clear" for peer in there if peer.last_counter)
        return all(self._may_leave_without(peer) for peer in there)

    def _may_leave_without(self, lead: Peer) -> bool:
        """Whether the lead has heard of our end, or is gone: what it said last may have waited for a host that was frozen."""
        if not lead.last_counter:
            return bool(lead.cleared_by)
        return lead.knows_clear() or self.now - lead.arrived_at > self.lost_after_s

    def say(self, own: Own, now: float) -> None:
        """Say something else of this node from now on, at once."""
        if own != self.own:
            self.own, self.send_at = own, now

    def hear(self, data: bytes, address: Address, now: float) -> None:
        """Take a datagram; whatever is not of this gang, or old, is dropped."""
        one = unseal(self.secret, data)
        if one is None or one.to != self.node_rank:
            return
        if self.node_rank == 0 and one.node_rank not in self.peers:
            self._welcome(one.node_rank, now)
        if one.node_rank not in self.peers:
            return
        peer = self.peers[one.node_rank]
        if not peer.hear(one, address, now):
            return
        if self.node_rank == 0:  # the lead answers at once: so a member's word is known to be heard
            self._send(peer, now)
        elif peer.last_counter and not peer.state:
            self.send_at = now  # the first answer: now the lead is to know that it was heard

    def _welcome(self, node_rank: int, now: float) -> None:
        """Make room for a node that joins an elastic job later: it knows the secret."""
        if 0 < node_rank < MOST_NODES:
            self.peers[node_rank] = Peer(node_rank, None, now)

    def poll(self, now: float) -> list[News]:
        """Send what is due, and return what is new."""
        self.now = now
        if now >= self.send_at:
            self.send_at = now + min(PERIOD_S, self.lost_after_s / 8)
            for peer in self.peers.values():
                self._send(peer, now)
        return [news for peer in self.peers.values() for news in self._look(peer, now)]

    def _send(self, peer: Peer, now: float) -> None:
        if peer.address is None:
            return  # a member that has not said anything yet
        counter = peer.next_counter(now)
        if self.own.phase == "clear" and not peer.cleared_by:
            peer.cleared_by = counter
        one = Datagram(
            node_rank=self.node_rank, to=peer.node_rank, counter=counter, echo=peer.last_counter, phase=self.own.phase,
            reason=self.own.reason, culprit=self.own.culprit, formations=self.own.formations,
        )  # fmt: skip
        self.outbox.append((peer.address, seal(self.secret, one)))

    def _look(self, peer: Peer, now: float) -> list[News]:
        found = []
        state = self._state_of(peer, now)
        if state != peer.state:
            what = "back" if peer.state == "lost" else state
            peer.state = state
            found.append(News(what=what, node_rank=peer.node_rank))
        if peer.phase != "up" and peer.reason and state != "lost":
            found.append(News(what="stops", node_rank=peer.node_rank, reason=peer.reason, culprit=peer.culprit))
        return found

    def _state_of(self, peer: Peer, now: float) -> str:
        if peer.heard_at is None:
            return "silent" if now - peer.began > FORM_S else ""
        if peer.phase == "clear":
            return "joined"  # it has said its last word, and may be gone
        return "lost" if now - peer.heard_at > self.lost_after_s else "joined"


def lead(secret: bytes, nodes: int, lost_after_s: float, now: float) -> Gang:
    """Return the lead's part: node 0, which hears all others."""
    peers = {node_rank: Peer(node_rank, None, now) for node_rank in range(1, nodes)}
    return Gang(node_rank=0, secret=secret, lost_after_s=lost_after_s, peers=peers)


def member(secret: bytes, node_rank: int, lead_address: Address, lost_after_s: float, now: float) -> Gang:
    """Return a member's part: it hears the lead only."""
    peers = {0: Peer(0, lead_address, now)}
    return Gang(node_rank=node_rank, secret=secret, lost_after_s=lost_after_s, peers=peers)
