"""Which nodes of a job are alive, decided from datagrams and the clock. Pure: the socket is in `udp.py`.

States, transitions and promises are described in the package's `__init__`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from distmagic.remote.gang.datagrams import NOBODY, Datagram, OwnState, seal, unseal
from distmagic.remote.wire.bounds import MOST_NODES
from distmagic.remote.wire.vocabulary import StopReason

PERIOD_S = 0.5
FORM_S = 20.0  # after which a peer that has not joined is "silent"
_REMEMBERED = 128  # of the datagrams sent to one peer, whose time of sending is kept until they are echoed

Address = Any  # as the socket module returns it: its shape depends on the family


@dataclass(frozen=True, kw_only=True)
class News:
    """A change of a peer: its new state ("joined", "silent", "lost" or "back"), or "stops".

    "stops" comes again with each poll while the peer says so; `reason` and `culprit` are the peer's words.
    """

    kind: str
    node_rank: int
    reason: StopReason | Literal[""] = ""
    culprit: int = NOBODY


class Peer:
    """One other node. `said` is what its latest datagram says."""

    def __init__(self, node_rank: int, address: Address | None, now: float) -> None:
        self.node_rank = node_rank
        self.address = address
        self.began = now
        self.arrived_at = now  # when its latest datagram arrived
        self.alive_at: float | None = (
            None  # when we sent the latest datagram that it has echoed: it lived then
        )
        self.last_counter = 0  # of its latest datagram; 0 if none has arrived
        self.sent_counter = 0  # of our latest datagram to it
        self.said = OwnState()
        self.state = ""  # "", joined, silent or lost: as last reported
        self.acknowledged = 0  # the highest counter of ours that it has echoed
        self.clear_counter = (
            0  # of the first datagram in which we said "clear"; 0 if none has
        )
        self._sent: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def next_counter(self, now: float) -> int:
        """Return the counter of the next datagram to this peer, and remember when it was sent."""
        self.sent_counter += 1
        self._sent.append((self.sent_counter, now))
        return self.sent_counter

    def update(self, one: Datagram, address: Address, now: float) -> bool:
        """Take over what a datagram says; return False, and change nothing, for one that is replayed or impossible."""
        if one.counter <= self.last_counter or one.echo > self.sent_counter:
            return False
        self.last_counter = one.counter
        self.address = address
        self.arrived_at = now
        self.said = one.said
        self.acknowledged = max(self.acknowledged, one.echo)
        for counter, sent_at in self._sent:
            if counter == one.echo:
                self.alive_at = max(self.alive_at or sent_at, sent_at)
        return True

    def knows_clear(self) -> bool:
        """Whether this peer has echoed a datagram in which we said that no process is left here."""
        return self.clear_counter > 0 and self.acknowledged >= self.clear_counter


@dataclass
class Gang:
    """One node's part of the gang channel. Its caller sends the (address, bytes) in `outbox` and empties it."""

    node_rank: int
    secret: bytes = field(repr=False)
    lost_after_s: float
    peers: dict[int, Peer]
    own: OwnState = field(default_factory=OwnState)
    outbox: list[tuple[Address, bytes]] = field(default_factory=list)
    send_at: float = 0.0
    now: float = 0.0
    tells_of_returned: bool = False  # of the lead: members hear it alone

    @property
    def has_formed(self) -> bool:
        """Whether at least one peer is joined."""
        return any(peer.state == "joined" for peer in self.peers.values())

    @property
    def alive_count(self) -> int:
        """How many nodes are joined and do not stop, this one included."""
        alive = [
            peer
            for peer in self.peers.values()
            if peer.state == "joined" and peer.said.phase == "up"
        ]
        return 1 + len(alive)

    def is_alive(self, node_rank: int) -> bool | None:
        """Whether a node still runs: it is not lost, and has not reported that no process is left. None before its first datagram."""
        peer = self.peers.get(node_rank)
        if peer is None or not peer.last_counter:
            return None
        return peer.state != "lost" and peer.said.phase != "clear"

    @property
    def formations(self) -> int:
        """How often the lead has asked the nodes to form anew, as far as this node knows."""
        return (
            self.own.formations
            if self.node_rank == 0
            else self.peers[0].said.formations
        )

    @property
    def is_detached(self) -> bool:
        """Whether the job needs no notebook any more, as far as this node knows from the lead."""
        return (
            self.own.is_detached
            if self.node_rank == 0
            else self.peers[0].said.is_detached
        )

    @property
    def has_returned_node(self) -> bool:
        """Whether all ranks of a node that still runs have returned, as far as this node knows; a member, from the lead."""
        return any(
            peer.said.has_returned and peer.said.phase == "up" and peer.state != "lost"
            for peer in self.peers.values()
        )

    @property
    def has_ending_node(self) -> bool:
        """Whether a rank of another node is about to end by itself, as far as this node knows; a member, from the lead."""
        return any(
            peer.said.is_ending and peer.state != "lost" for peer in self.peers.values()
        )

    @property
    def has_paused_node(self) -> bool:
        """Whether a rank of another node waits for somebody to type; the lead hears of all nodes."""
        return any(
            peer.said.is_paused and peer.state != "lost" for peer in self.peers.values()
        )

    @property
    def may_leave(self) -> bool:
        """True once this node may exit: no peer waits for a datagram of it, and the lead waits for no member's end."""
        if self.node_rank != 0:
            lead = self.peers[0]
            if lead.state not in ("", "joined"):
                return True
            if not lead.last_counter:
                # It can't be reached: having sent "clear" once is enough.
                return lead.clear_counter > 0
            # The lead may be gone although its state is not "lost": while this host was frozen, the lead's last datagrams
            # waited in our socket, and all of them look fresh.
            return lead.knows_clear() or self.now - lead.arrived_at > self.lost_after_s
        for peer in self.peers.values():
            # "": also of a member whose only datagram came just now, in a short job, the end is waited for.
            if (
                peer.state in ("", "joined")
                and peer.last_counter
                and peer.said.phase != "clear"
            ):
                return False
        return True

    def announce(self, own: OwnState, now: float) -> None:
        """Change what our datagrams say about this node. If that is new, the next poll sends at once."""
        if own != self.own:
            self.own = own
            self.send_at = now

    def receive(self, data: bytes, address: Address, now: float) -> None:
        """Handle a datagram. One that is not of this gang, or not new, is dropped."""
        one = unseal(self.secret, data)
        if one is None or one.to != self.node_rank:
            return
        peer = self.peers.get(one.node_rank)
        if peer is None and self.node_rank == 0 and 0 < one.node_rank < MOST_NODES:
            # A node that joins an elastic job later. It has the secret, so it is one of the job's.
            peer = self.peers[one.node_rank] = Peer(one.node_rank, None, now)
        if peer is None or not peer.update(one, address, now):
            return
        if self.node_rank == 0:
            # At once: so a member knows within a round trip that its datagram arrived.
            self._send(peer, now)
        elif not peer.state:
            self.send_at = now  # the lead's first answer: echo it at once, so that the lead has a round trip too

    def poll(self, now: float) -> list[News]:
        """Put the datagrams that are due into `outbox`, and return what changed."""
        self.now = now
        self.tells_of_returned = self.node_rank == 0 and self.has_returned_node
        if now >= self.send_at:
            # Some may get lost before a peer counts as lost.
            self.send_at = now + min(PERIOD_S, self.lost_after_s / 8)
            for peer in self.peers.values():
                self._send(peer, now)
        found = []
        for peer in self.peers.values():
            found += self._news_of(peer, now)
        return found

    def _send(self, peer: Peer, now: float) -> None:
        if peer.address is None:
            return  # a member's address is known from its first datagram on
        counter = peer.next_counter(now)
        if self.own.phase == "clear" and not peer.clear_counter:
            peer.clear_counter = counter
        said = replace(
            self.own,
            has_returned=self.own.has_returned or self.tells_of_returned,
            is_ending=self.own.is_ending
            or (self.node_rank == 0 and self.has_ending_node),
        )
        one = Datagram(
            node_rank=self.node_rank,
            to=peer.node_rank,
            counter=counter,
            echo=peer.last_counter,
            said=said,
        )
        self.outbox.append((peer.address, seal(self.secret, one)))

    def _news_of(self, peer: Peer, now: float) -> list[News]:
        found = []
        if peer.alive_at is None:
            state = "silent" if now - peer.began > FORM_S else ""
        elif peer.said.phase == "clear":
            state = "joined"  # its agent may have exited meanwhile, which is no loss
        else:
            state = "lost" if now - peer.alive_at > self.lost_after_s else "joined"
        if state != peer.state:
            kind = "back" if peer.state == "lost" else state
            peer.state = state
            found.append(News(kind=kind, node_rank=peer.node_rank))
        if peer.said.phase != "up" and peer.said.reason and state != "lost":
            stops = News(
                kind="stops",
                node_rank=peer.node_rank,
                reason=peer.said.reason,
                culprit=peer.said.culprit,
            )
            found.append(stops)
        return found


def lead(secret: bytes, nodes: int, lost_after_s: float, now: float) -> Gang:
    """Return the lead's part (node 0), which has every member as a peer."""
    peers = {node_rank: Peer(node_rank, None, now) for node_rank in range(1, nodes)}
    return Gang(node_rank=0, secret=secret, lost_after_s=lost_after_s, peers=peers)


def member(
    secret: bytes,
    node_rank: int,
    lead_address: Address,
    lost_after_s: float,
    now: float,
) -> Gang:
    """Return a member's part, which has only the lead as a peer."""
    peers = {0: Peer(0, lead_address, now)}
    return Gang(
        node_rank=node_rank, secret=secret, lost_after_s=lost_after_s, peers=peers
    )
