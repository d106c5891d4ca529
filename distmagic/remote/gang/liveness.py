"""Decides from datagrams and the clock which nodes of a job are alive. Pure: the socket is in `udp.py`.

The package's `__init__` describes states, transitions and promises.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from distmagic.remote.gang.datagrams import NOBODY, Datagram, OwnState, seal, unseal
from distmagic.remote.wire.bounds import MOST_NODES
from distmagic.remote.wire.vocabulary import StopReason

PERIOD_S = 0.5
FORM_S = 20.0  # after this time a peer that has not joined is "silent"
_REMEMBERED = 128  # number of datagrams to one peer whose sending time is kept until they are echoed

# As returned by the socket module: its form depends on the address family.
Address = Any


@dataclass(frozen=True, kw_only=True)
class News:
    """A change of a peer: its new state ("joined", "silent", "lost" or "back"), or "stops".

    "stops" is repeated with each poll while the peer sends it; `reason` and `culprit` come from the peer.
    """

    kind: str
    node_rank: int
    reason: StopReason | Literal[""] = ""
    culprit: int = NOBODY


class Peer:
    """One other node. `said` is the content of its latest datagram."""

    def __init__(self, node_rank: int, address: Address | None, now: float) -> None:
        self.node_rank = node_rank
        self.address = address
        self.began = now
        self.arrived_at = now  # when its latest datagram arrived
        self.alive_at: float | None = (
            # When this node sent the latest datagram that the peer has echoed: the peer was alive then.
            None
        )
        self.last_counter = 0  # of its latest datagram; 0 if none has arrived
        self.sent_counter = 0  # of this node's latest datagram to it
        self.said = OwnState()
        self.state = ""  # "", joined, silent or lost: as last reported
        self.acknowledged = 0  # this node's highest counter that the peer has echoed
        self.clear_counter = (
            0  # of this node's first datagram with the phase "clear"; 0 before that
        )
        self._sent: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def next_counter(self, now: float) -> int:
        """Return the counter of the next datagram to this peer, and record its sending time."""
        self.sent_counter += 1
        self._sent.append((self.sent_counter, now))
        return self.sent_counter

    def update(self, one: Datagram, address: Address, now: float) -> bool:
        """Apply a datagram; return False, and change nothing, for a replayed or impossible one."""
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
        """Whether this peer has echoed a datagram with this node's phase "clear"."""
        return self.clear_counter > 0 and self.acknowledged >= self.clear_counter


@dataclass
class Gang:
    """One node's heartbeats. The caller sends the (address, bytes) in `outbox` and empties it."""

    node_rank: int
    secret: bytes = field(repr=False)
    lost_after_s: float
    peers: dict[int, Peer]
    own: OwnState = field(default_factory=OwnState)
    outbox: list[tuple[Address, bytes]] = field(default_factory=list)
    send_at: float = 0.0
    now: float = 0.0
    # Set on the lead: members receive it only from the lead.
    tells_of_returned: bool = False

    @property
    def has_formed(self) -> bool:
        """Whether at least one peer is joined."""
        return any(peer.state == "joined" for peer in self.peers.values())

    @property
    def alive_count(self) -> int:
        """The number of nodes that are joined and do not stop, including this one."""
        alive = [
            peer
            for peer in self.peers.values()
            if peer.state == "joined" and peer.said.phase == "up"
        ]
        return 1 + len(alive)

    def is_alive(self, node_rank: int) -> bool | None:
        """Whether a node still runs: it is not lost, and has not reported that no process is left.

        None before its first datagram.
        """
        peer = self.peers.get(node_rank)
        if peer is None or not peer.last_counter:
            return None
        return peer.state != "lost" and peer.said.phase != "clear"

    @property
    def formations(self) -> int:
        """How often the lead has asked the nodes to restart their ranks; on a member, by the lead's last datagram."""
        return (
            self.own.formations
            if self.node_rank == 0
            else self.peers[0].said.formations
        )

    @property
    def is_detached(self) -> bool:
        """Whether the job needs no notebook any more; on a member, by the lead's last datagram."""
        return (
            self.own.is_detached
            if self.node_rank == 0
            else self.peers[0].said.is_detached
        )

    @property
    def has_returned_node(self) -> bool:
        """Whether there is a running node whose ranks have all returned from their call.

        Only the lead receives this from every node. A member receives the result from the lead.
        """
        return any(
            peer.said.has_returned and peer.said.phase == "up" and peer.state != "lost"
            for peer in self.peers.values()
        )

    @property
    def has_ending_node(self) -> bool:
        """Whether a rank of another node is about to end by itself, because it was asked to.

        Only the lead receives this from every node. A member receives the result from the lead.
        """
        return any(
            peer.said.is_ending and peer.state != "lost" for peer in self.peers.values()
        )

    @property
    def has_paused_node(self) -> bool:
        """Whether a rank of another node waits for the user's input. On a member it is about the lead's ranks only."""
        return any(
            peer.said.is_paused and peer.state != "lost" for peer in self.peers.values()
        )

    @property
    def has_node_at_cell(self) -> bool:
        """Whether a rank of another node runs a cell. On a member it is about the lead's ranks only."""
        return any(
            peer.said.is_at_cell and peer.state != "lost"
            for peer in self.peers.values()
        )

    @property
    def may_leave(self) -> bool:
        """Whether this node may exit: no peer needs a datagram of it, and the lead waits for no member's end."""
        if self.node_rank != 0:
            lead = self.peers[0]
            if lead.state not in ("", "joined"):
                return True
            if not lead.last_counter:
                # It is unreachable: one "clear" is enough.
                return lead.clear_counter > 0
            # The lead may be gone although its state is not "lost": while this host was frozen, the lead's last
            # datagrams waited in this host's socket, and all of them look new.
            return lead.knows_clear() or self.now - lead.arrived_at > self.lost_after_s
        for peer in self.peers.values():
            # "": in a short job, also wait for the end of a member whose only datagram has just come.
            if (
                peer.state in ("", "joined")
                and peer.last_counter
                and peer.said.phase != "clear"
            ):
                return False
        return True

    def announce(self, own: OwnState, now: float) -> None:
        """Change this node's state in its datagrams. If it is new, the next poll sends at once."""
        if own != self.own:
            self.own = own
            self.send_at = now

    def receive(self, data: bytes, address: Address, now: float) -> None:
        """Handle a datagram. One from outside of this job, or not new, is dropped."""
        one = unseal(self.secret, data)
        if one is None or one.to != self.node_rank:
            return
        peer = self.peers.get(one.node_rank)
        if peer is None and self.node_rank == 0 and 0 < one.node_rank < MOST_NODES:
            # A node that joins an elastic job later. It has the secret, so it belongs to the job.
            peer = self.peers[one.node_rank] = Peer(one.node_rank, None, now)
        if peer is None or not peer.update(one, address, now):
            return
        if self.node_rank == 0:
            # At once, so that a member knows within a round trip that its datagram arrived.
            self._send(peer, now)
        elif not peer.state:
            self.send_at = now  # the lead's first answer: echo it at once, so that the lead has a round trip too

    def poll(self, now: float) -> list[News]:
        """Put the datagrams that are due into `outbox`, and return all changes."""
        self.now = now
        self.tells_of_returned = self.node_rank == 0 and self.has_returned_node
        if now >= self.send_at:
            # Some may be lost before a peer counts as lost.
            self.send_at = now + min(PERIOD_S, self.lost_after_s / 8)
            for peer in self.peers.values():
                self._send(peer, now)
        found = []
        for peer in self.peers.values():
            found += self._news_of(peer, now)
        return found

    def _send(self, peer: Peer, now: float) -> None:
        if peer.address is None:
            return  # a member's address is unknown before its first datagram
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
    """Return the lead's object (node 0), with every member as a peer."""
    peers = {node_rank: Peer(node_rank, None, now) for node_rank in range(1, nodes)}
    return Gang(node_rank=0, secret=secret, lost_after_s=lost_after_s, peers=peers)


def member(
    secret: bytes,
    node_rank: int,
    lead_address: Address,
    lost_after_s: float,
    now: float,
) -> Gang:
    """Return a member's object, with only the lead as a peer."""
    peers = {0: Peer(0, lead_address, now)}
    return Gang(
        node_rank=node_rank, secret=secret, lost_after_s=lost_after_s, peers=peers
    )
