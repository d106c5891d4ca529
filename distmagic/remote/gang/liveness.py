"""Decides from datagrams and the clock which nodes of a job are alive.

Pure: the socket is in `udp.py`.

The package's `__init__` describes states, transitions and promises.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from distmagic.remote.frozen import frozen
from distmagic.remote.gang.datagrams import NOBODY, Datagram, OwnState, seal, unseal
from distmagic.remote.wire.bounds import MOST_NODES
from distmagic.remote.wire.vocabulary import StopReason

PERIOD_S = 0.5
FORM_S = 20.0  # after this time a peer that has not joined is "silent"
# number of datagrams to one peer whose sending time is kept until they are echoed
_REMEMBERED = 128

# As returned by the socket module: its form depends on the address family.
Address = Any


@frozen
class News:
    """A change of a peer: its new state ("joined", "silent", "lost" or "back"), or "stops".

    "stops" is repeated with each poll while the peer sends it; `reason` and `culprit` come from the
    peer.
    """

    kind: str
    node_rank: int
    reason: StopReason | Literal[""] = ""
    culprit: int = NOBODY


@dataclass(eq=False)
class Peer:
    """One other node. `said` is the content of its latest datagram."""

    node_rank: int
    address: Address | None
    began: float
    arrived_at: float = 0.0  # when its latest datagram arrived
    # When this node sent the latest datagram that the peer has echoed: the peer was alive then.
    alive_at: float | None = None
    last_counter: int = 0  # of its latest datagram; 0 if none has arrived
    sent_counter: int = 0  # of this node's latest datagram to it
    said: OwnState = field(default_factory=OwnState)
    state: str = ""  # "", joined, silent or lost: as last reported
    acknowledged: int = 0  # this node's highest counter that the peer has echoed
    # Of this node's first datagram with the phase "clear"; 0 before that.
    clear_counter: int = 0
    # Counter and sending time of this node's latest datagrams to it.
    sent: deque[tuple[int, float]] = field(
        default_factory=lambda: deque(maxlen=_REMEMBERED)
    )

    def update(self, one: Datagram, address: Address, now: float) -> bool:
        """Apply a datagram; return False, and change nothing, for a replayed or impossible one."""
        if one.counter <= self.last_counter or one.echo > self.sent_counter:
            return False
        self.last_counter = one.counter
        self.address = address
        self.arrived_at = now
        self.said = one.said
        self.acknowledged = max(self.acknowledged, one.echo)
        for counter, sent_at in self.sent:
            if counter == one.echo:
                self.alive_at = max(self.alive_at or sent_at, sent_at)
        return True


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
        """How often the lead has asked the nodes to restart their ranks; on a member, by the lead's
        last datagram.
        """
        return self._of_lead.formations

    @property
    def is_detached(self) -> bool:
        """Whether the job needs no notebook any more; on a member, by the lead's last datagram."""
        return self._of_lead.is_detached

    @property
    def _of_lead(self) -> OwnState:
        return self.own if self.node_rank == 0 else self.peers[0].said

    @property
    def _of_others(self) -> list[OwnState]:
        """The states of the peers that are not lost."""
        return [peer.said for peer in self.peers.values() if peer.state != "lost"]

    @property
    def has_returned_node(self) -> bool:
        """Whether there is a running node whose ranks have all returned from their call.

        Only the lead receives this from every node. A member receives the result from the lead.
        """
        return any(said.has_returned and said.phase == "up" for said in self._of_others)

    @property
    def has_ending_node(self) -> bool:
        """Whether a rank of another node is about to end by itself, because it was asked to.

        Only the lead receives this from every node. A member receives the result from the lead.
        """
        return any(said.is_ending for said in self._of_others)

    @property
    def has_paused_node(self) -> bool:
        """Whether a rank of another node waits for the user's input.

        On a member it is about the lead's ranks only.
        """
        return any(said.is_paused for said in self._of_others)

    @property
    def has_node_at_cell(self) -> bool:
        """Whether a rank of another node runs a cell.

        On a member it is about the lead's ranks only.
        """
        return any(said.is_at_cell for said in self._of_others)

    @property
    def may_leave(self) -> bool:
        """Whether this node may exit: no peer needs a datagram of it, and the lead waits for no
        member's end.
        """
        if self.node_rank != 0:
            lead = self.peers[0]
            if lead.state not in ("", "joined"):
                return True
            if not lead.last_counter:
                # It is unreachable: one "clear" is enough.
                return lead.clear_counter > 0
            # The lead may be gone although its state is not "lost": while this host was frozen, the
            # lead's last datagrams waited in this host's socket, and all of them look new.
            knows_clear = 0 < lead.clear_counter <= lead.acknowledged
            return knows_clear or self.now - lead.arrived_at > self.lost_after_s
        # "": in a short job, also wait for the end of a member whose only datagram has just come.
        return not any(
            peer.state in ("", "joined")
            and peer.last_counter
            and peer.said.phase != "clear"
            for peer in self.peers.values()
        )

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
            # The lead's first answer: echo it at once, so that the lead has a round trip too.
            self.send_at = now

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
        peer.sent_counter += 1
        peer.sent.append((peer.sent_counter, now))
        if self.own.phase == "clear" and not peer.clear_counter:
            peer.clear_counter = peer.sent_counter
        said = replace(
            self.own,
            has_returned=self.own.has_returned or self.tells_of_returned,
            is_ending=self.own.is_ending
            or (self.node_rank == 0 and self.has_ending_node),
        )
        one = Datagram(
            node_rank=self.node_rank,
            to=peer.node_rank,
            counter=peer.sent_counter,
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


# A node without peers.
ALONE = Gang(node_rank=0, secret=b"", lost_after_s=0.0, peers={})


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
