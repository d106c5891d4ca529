"""The table of a run's nodes: the link over which each node is followed, and what to try next.

Events go in, actions come out. The table never blocks, connects or reads a clock. Only the run's
own thread changes it.

    state of a row   leaves it when
    waiting          the lead of an elastic job has registered it, and this notebook starts it:
                     Joined -> following
    following        LinkEnded: the agent ended -> collecting; the link broke -> reconnecting; else
                     -> lost
    reconnecting     Linked -> following; the time is over -> lost. The pauses between attempts grow
    meeting          as reconnecting, for a node that another notebook starts, or whose start is
                     unconfirmed; in the end this one starts it itself
    collecting       Collected -> gone
    gone, lost       never. In an elastic job the host of a lost node is tried as a new node

A row is lost when nothing more is tried for its node. `RunState.lost` may have other nodes too,
without which the run continues or ends (see state/__init__). They are still followed, or retried,
until the run is over. Their last events may explain the loss, and in an elastic job their
heartbeats may return.

Promised: each event of a node is put on the queue once, in order, over any number of links. Not
promised: that a lost node has ended; its peers, or its lease, end it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

from distmagic.connection.link import Link
from distmagic.connection.link_opener import UNKNOWN_HOST
from distmagic.connection.requests import job_requests
from distmagic.errors import (
    ConnectionLost,
    DistmagicError,
    HostError,
    HostKeyError,
    ProtocolError,
    Unreachable,
    UsageError,
)
from distmagic.remote.gang.liveness import FORM_S
from distmagic.remote.wire import protocol
from distmagic.remote.wire.bounds import MOST_NODES
from distmagic.runner.actions import (
    TOO_LATE,
    Action,
    AttemptFailed,
    Close,
    Collect,
    Collected,
    Join,
    Joined,
    JoinFailed,
    Linked,
    LinkEnded,
    Listen,
    Note,
    Reconnect,
    Send,
)
from distmagic.runner.node_row import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Attempts,
    Growth,
    HostJoin,
    NodeRow,
)
from distmagic.state.events import (
    NEVER_BEGAN,
    Broken,
    Event,
    Gone,
    Lost,
    Mended,
    Warned,
)

Actions = list[Action]
REFUSED_PAUSE_S = 60.0  # pause after an attempt to join was refused


class NodeTable:
    """All nodes of one run.

    `new_id` makes the ID of a request; a link may be broken for `lease_s`.
    """

    def __init__(
        self,
        host_indices: Iterable[int],
        lease_s: float,
        new_id: Callable[[], str],
        growth: Growth | None = None,
    ) -> None:
        self.rows = [NodeRow(host_index=index) for index in host_indices]
        # By node and rank: a host may only report its own ranks.
        self.small_results: dict[tuple[int, int], bytes] = {}
        self.is_stopping = False
        self._lease_s = lease_s
        self._new_id = new_id
        self._growth = growth
        self._joins: dict[int, HostJoin] = {}

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that the run holds."""
        return tuple(row.link for row in self.rows if row.link is not None)

    # ---- start

    def follow(self, links: Mapping[int, Link], now_s: float) -> Actions:
        """Start to follow all nodes; connect to those without a link."""
        actions: Actions = []
        for node_rank in range(len(self.rows)):
            if node_rank in links:
                actions += self._listen(node_rank, links[node_rank])
            else:
                actions += self._break(node_rank, "it could not be reached", now_s)
        if self._growth is not None:
            for host_index in self._growth.awaited:
                self._begin_join(host_index, None, now_s)
        return actions

    def stop(self, node_ranks: Iterable[int], message: protocol.StopNode) -> Actions:
        """Stop nodes. If a link is broken, the message waits for a new one.

        No host joins from now on.
        """
        self.is_stopping = True
        actions: Actions = []
        links = []
        for node_rank in node_ranks:
            row = self.rows[node_rank]
            row.stop = message
            if row.link is not None:
                links.append(row.link)
        if links:
            actions.append(Send(links=tuple(links), message=message))
        # An agent that is being started is stopped as soon as it runs.
        late = [one.joined.link for one in self._joins.values() if one.joined]
        if late:
            actions.append(Send(links=tuple(late), message=TOO_LATE))
        self._joins.clear()
        return actions

    # ---- events

    def receive(self, event: Event) -> Actions:
        """Return the actions that an event requires."""
        handler = self._HANDLERS.get(type(event.what))
        if handler is None or not 0 <= event.node_rank < len(self.rows):
            return []
        return handler(self, event.node_rank, event.what, event.at_s)

    def _final(self, node_rank: int, what: protocol.Final, _: float) -> Actions:
        row = self.rows[node_rank]
        row.is_final = True
        if what.reason == "lost" and node_rank != 0:
            row.is_missed = True
        return []

    def _rank_ended(self, node_rank: int, what: protocol.Ended, _: float) -> Actions:
        sizes = self.rows[node_rank].sizes
        sizes.pop(what.rank, None)  # of the rank before a restart
        if job_requests.is_small(what.result_bytes):
            sizes[what.rank] = what.result_bytes or 0
        return []

    def _peer_state(self, _: int, what: protocol.PeerState, __: float) -> Actions:
        """Keep a node lost that is no longer retried, whatever its peers report: its end would go
        unnoticed.
        """
        peer = what.node_rank
        if not 0 <= peer < len(self.rows) or self.rows[peer].state != "lost":
            return []
        return [self._note_lost(peer)]

    def _hardware(self, node_rank: int, _: protocol.Hardware, __: float) -> Actions:
        """The agent answered over this link and its lease was renewed, even if the job itself is
        silent.
        """
        if self.rows[node_rank].state == "following":
            self.rows[node_rank].attempts = None
        return []

    def _link_ended(self, node_rank: int, what: LinkEnded, now_s: float) -> Actions:
        row = self.rows[node_rank]
        # Otherwise it ended at once, perhaps like the one before.
        if what.last > row.last or now_s - row.linked_at_s > LONGEST_PAUSE_S:
            row.attempts = None
        row.last = what.last
        if row.is_final and what.error is None:
            row.state = "collecting"
            sizes = dict(row.sizes)
            return [Collect(node_rank=node_rank, link=what.link, sizes=sizes)]
        if row.is_final:
            return self._end(node_rank, now_s)
        if what.error is None:
            error = what.link.agent_error
            why = (
                f"its agent broke down: {error}"
                if error
                else "its agent exited without an error message (was it killed?)"
            )
            # The agent is gone, not the connection, which other runs of this kernel share.
            row.link = None
            row.is_agent_gone = True
            return [Close(link=what.link), *self._lose(node_rank, why, now_s)]
        if isinstance(what.error, ConnectionLost):
            return self._break(node_rank, what.error.message, now_s)
        return self._lose(node_rank, _words(what.error), now_s)

    def _collected(self, node_rank: int, what: Collected, now_s: float) -> Actions:
        for rank, data in what.results.items():
            self.small_results[node_rank, rank] = data
        if what.is_kept_idle:
            self.rows[node_rank].link = None
        return self._end(node_rank, now_s)

    def _linked(self, node_rank: int, what: Linked, now_s: float) -> Actions:
        row = self.rows[node_rank]
        was_broken = row.state == "reconnecting"
        actions: Actions = []
        if row.stop is not None:
            # It may have been lost with the connection.
            actions.append(Send(links=(what.link,), message=row.stop))
        row.linked_at_s = now_s
        if was_broken:
            actions.append(Note(node_rank=node_rank, what=Mended()))
        return actions + self._listen(node_rank, what.link)

    def _attempt_failed(
        self, node_rank: int, what: AttemptFailed, now_s: float
    ) -> Actions:
        row = self.rows[node_rank]
        assert row.attempts is not None
        row.why_unmet = NEVER_BEGAN if what.error is None else _words(what.error)
        if what.error is None or isinstance(what.error, (ConnectionLost, Unreachable)):
            row.attempts = row.attempts.again(now_s)
            return []
        if isinstance(what.error, HostKeyError) or not isinstance(
            what.error, (HostError, ProtocolError)
        ):
            return self._lose(node_rank, _words(what.error), now_s)
        # A refusal may be temporary: a locked key agent, or nologin while a machine boots. The user
        # is not asked again.
        row.can_ask = False
        row.attempts = row.attempts.again(now_s, LONGEST_PAUSE_S)
        if row.state == "meeting":
            return []
        return [Note(node_rank=node_rank, what=Broken(why=_words(what.error)))]

    # ---- hosts that join an elastic job

    def _node_added(
        self, node_rank: int, what: protocol.NodeAdded, now_s: float
    ) -> Actions:
        """The lead registered hosts as new nodes: for this notebook, or for another one that starts
        them.
        """
        if node_rank != 0:
            return []
        actions: Actions = []
        for host in what.hosts[len(self.rows) : MOST_NODES]:
            actions += self._add_row(host, what.request_id, now_s)
        return actions

    def _add_row(self, host: str, request_id: str, now_s: float) -> Actions:
        names = list(self._growth.host_names) if self._growth is not None else []
        row = NodeRow(host_index=names.index(host) if host in names else UNKNOWN_HOST)
        self.rows.append(row)
        node_rank = len(self.rows) - 1
        if row.host_index == UNKNOWN_HOST:
            # Run on without a node that this notebook can't follow.
            if self._growth is None:  # the job is over, and no host has this node
                return self._lose(node_rank, NEVER_BEGAN, now_s)
            text = (
                f"{host} joined the job, but is not among the hosts of this notebook, which does not show its ranks. "
                f"Add {host} to %distributed hosts, then %distributed attach shows them."
            )
            warning = Note(node_rank=node_rank, what=Warned(text=text))
            why = "it is not among the hosts of this notebook"
            return [warning, *self._lose(node_rank, why, now_s)]
        if self.is_stopping:
            return self._lose(node_rank, NEVER_BEGAN, now_s)
        join = self._joins.get(row.host_index)
        if join is not None and join.request_id == request_id:
            join.node_rank = node_rank
            join.own.add(node_rank)
            if join.joined is None:
                return []
            del self._joins[row.host_index]
            return self._listen(node_rank, join.joined.link)
        self._meet(row, now_s)
        return []

    def _meet(self, row: NodeRow, now_s: float) -> None:
        """Search on its host for a node that another notebook starts, or may have started, and
        follow it.
        """
        row.state = "meeting"
        row.attempts = Attempts(next_at_s=now_s + FIRST_PAUSE_S, until_s=now_s + FORM_S)

    def _begin_join(self, host_index: int, broken: Link | None, now_s: float) -> None:
        if self._growth is None or self.is_stopping or host_index == UNKNOWN_HOST:
            return
        attempts = Attempts(next_at_s=now_s + FIRST_PAUSE_S)
        self._joins[host_index] = HostJoin(
            own={self._newest(host_index)}, attempts=attempts, broken=broken
        )

    def _newest(self, host_index: int) -> int:
        """Return the last node that a host was, -1 for none."""
        rows = enumerate(self.rows)
        own = (node_rank for node_rank, row in rows if row.host_index == host_index)
        return max(own, default=-1)

    def _joined(self, _: int, what: Joined, __: float) -> Actions:
        join = self._joins.get(what.host_index)
        rows = self.rows[what.node_rank : what.node_rank + 1]
        actions: Actions = []
        message = TOO_LATE
        if rows and rows[0].state == "waiting":
            self._joins.pop(what.host_index, None)
            actions += self._listen(what.node_rank, what.link)
            message = rows[0].stop or message  # it may have ranks by then
        elif join is not None and join.request_id == what.request_id:
            # Only the lead's event makes the node known to all notebooks that follow the job.
            join.joined = what
            return []
        elif not self.is_stopping:
            actions.append(Close(link=what.link))
        if self.is_stopping:
            actions.append(Send(links=(what.link,), message=message))
        return actions

    def _join_failed(self, _: int, what: JoinFailed, now_s: float) -> Actions:
        join = self._joins.get(what.host_index)
        node_rank = what.node_rank
        # The run is being stopped meanwhile, or the host is already being tried again.
        if join is None or join.request_id != what.request_id:
            if node_rank is None or node_rank >= len(self.rows):
                return []
            if self.rows[node_rank].state == "waiting":
                return self._lose(node_rank, str(what.error), now_s)
            return []
        is_unanswered = isinstance(what.error, (ConnectionLost, Unreachable))
        if is_unanswered and node_rank is not None:
            # Its agent may have started all the same: it is searched for now, or after the lead's
            # event.
            del self._joins[what.host_index]
            if join.node_rank is not None:
                row = self.rows[join.node_rank]
                row.why_unmet = _words(what.error)
                self._meet(row, now_s)
            return []
        actions: Actions = []
        if join.node_rank is not None:
            # The attempts at this host continue below, with growing pauses.
            actions += self._lose(join.node_rank, str(what.error), now_s, rejoins=False)
        join.request_id = ""
        join.node_rank = None
        # A UsageError means that the host's previous node has not ended yet.
        if is_unanswered or isinstance(what.error, UsageError):
            join.attempts = join.attempts.again(now_s)
            return actions
        why = _words(what.error).rstrip(".")
        warning = Warned(text=f"{why}. The run continues without this host.")
        actions.append(Note(node_rank=0, what=warning))
        # This may be temporary: a booting machine refuses every log-in at first.
        if isinstance(what.error, DistmagicError):
            join.attempts = join.attempts.again(now_s, REFUSED_PAUSE_S)
        else:
            del self._joins[what.host_index]
        return actions

    # ---- timers

    def due(self, now_s: float, alive_elsewhere: Collection[int] = ()) -> Actions:
        """Return the attempts whose time has come, and give up those whose time is over.

        Nodes in `alive_elsewhere` run, even if this notebook can't reach them: they are not given
        up.
        """
        actions: Actions = []
        for node_rank, row in enumerate(self.rows):
            if row.attempts is None or row.attempts.next_at_s is None:
                continue
            until_s = row.attempts.until_s
            if (
                until_s is not None
                and now_s >= until_s
                and node_rank not in alive_elsewhere
            ):
                why = (
                    row.why_unmet
                    if row.state == "meeting"
                    else f"no connection for {self._lease_s:g} s"
                )
                actions += self._lose(node_rank, why, now_s)
            elif now_s >= row.attempts.next_at_s:
                row.attempts = replace(row.attempts, next_at_s=None)
                attempt = Reconnect(
                    node_rank=node_rank,
                    host_index=row.host_index,
                    meets=row.state == "meeting",
                    after=row.last,
                    broken=row.link,
                    can_ask=row.can_ask,
                )
                actions.append(attempt)
        for host_index, join in list(self._joins.items()):
            if self._newest(host_index) not in join.own:
                del self._joins[host_index]  # another notebook has started it
            elif (
                join.attempts.next_at_s is not None and now_s >= join.attempts.next_at_s
            ):
                join.attempts = replace(join.attempts, next_at_s=None)
                join.request_id = self._new_id()
                actions.append(
                    Join(
                        host_index=host_index,
                        request_id=join.request_id,
                        broken=join.broken,
                    )
                )
        return actions

    # ---- transitions

    def _listen(self, node_rank: int, link: Link) -> Actions:
        row = self.rows[node_rank]
        row.link = link
        row.state = "following"
        row.can_ask = True
        return [Listen(node_rank=node_rank, link=link, after=row.last)]

    def _break(self, node_rank: int, why: str, now_s: float) -> Actions:
        row = self.rows[node_rank]
        row.state = "reconnecting"
        if row.attempts is not None:  # the link ended at once
            row.attempts = row.attempts.again(now_s)
            return [Note(node_rank=node_rank, what=Broken(why=why, again=True))]
        row.attempts = Attempts(
            next_at_s=now_s + FIRST_PAUSE_S, until_s=now_s + self._lease_s
        )
        return [Note(node_rank=node_rank, what=Broken(why=why))]

    def _end(self, node_rank: int, now_s: float) -> Actions:
        row = self.rows[node_rank]
        row.state = "gone"
        row.attempts = None
        if row.is_missed:
            self._begin_join(row.host_index, row.link, now_s)
        return [Note(node_rank=node_rank, what=Gone())]

    def _lose(
        self, node_rank: int, why: str, now_s: float, *, rejoins: bool = True
    ) -> Actions:
        """Stop retrying a node.

        `rejoins`: in an elastic job its host is tried as a new node from now on.
        """
        row = self.rows[node_rank]
        row.state = "lost"
        row.why_lost = why
        row.attempts = None
        row.is_missed = True
        if rejoins:
            self._begin_join(row.host_index, row.link, now_s)
        return [self._note_lost(node_rank)]

    def _note_lost(self, node_rank: int) -> Note:
        row = self.rows[node_rank]
        what = Lost(why=row.why_lost, is_agent_gone=row.is_agent_gone)
        return Note(node_rank=node_rank, what=what)

    _HANDLERS: ClassVar[dict[type, Callable[..., Actions]]] = {
        protocol.Final: _final,
        protocol.Hardware: _hardware,
        protocol.Ended: _rank_ended,
        protocol.NodeAdded: _node_added,
        protocol.PeerState: _peer_state,
        LinkEnded: _link_ended,
        Collected: _collected,
        Linked: _linked,
        AttemptFailed: _attempt_failed,
        Joined: _joined,
        JoinFailed: _join_failed,
    }


def _words(error: Exception) -> str:
    return (
        error.message
        if isinstance(error, DistmagicError)
        else f"a fault of distmagic: {error!r}"
    )
