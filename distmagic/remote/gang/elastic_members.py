"""Hosts that come to an elastic job while it runs: its lead counts them, so that no two notebooks start one twice."""

from __future__ import annotations

from collections.abc import Callable

from distmagic.remote.gang.liveness import FORM_S
from distmagic.remote.wire import protocol


class ElasticMembers:
    """The nodes of an elastic job by host, those that were lost included; `stands` says which the lead hears."""

    def __init__(self, start: protocol.StartNode, stands: Callable[[int], bool | None], now: float) -> None:
        self._most = start.terms.max_nodes if start.membership and start.lead else 0
        self._stands = stands
        self._hosts = list(start.hosts)
        self._since = [now for _ in start.hosts]

    def enlist(self, request: protocol.AddNode, now: float, *, is_ending: bool) -> protocol.NodeAdded:
        """Count a host as one more node. Raises ValueError, in words, where that can't be."""
        if not self._most:
            raise ValueError("this job is not elastic, or its first host is another one")
        if is_ending:
            raise ValueError("it is about to end")
        there = [node for node in range(len(self._hosts)) if self._is_there(node, now)]
        if request.host in [self._hosts[node] for node in there]:
            raise ValueError(f"{request.host} is a node of this job")
        if len(there) >= self._most:
            raise ValueError(f"it has {len(there)} nodes, and --nnodes allows no more")
        self._hosts.append(request.host)
        self._since.append(now)
        return protocol.NodeAdded(request_id=request.request_id, hosts=tuple(self._hosts))

    def _is_there(self, node: int, now: float) -> bool:
        """Whether a node may still take part: the lead itself, one that is heard, one that is about to begin."""
        stands = self._stands(node)
        return node == 0 or (now - self._since[node] < FORM_S if stands is None else stands)
