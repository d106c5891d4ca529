"""Hosts that join a running elastic job.

Only its lead admits them, so that two notebooks never start one twice.
"""

from __future__ import annotations

from collections.abc import Callable

from distmagic.remote.gang.liveness import FORM_S
from distmagic.remote.wire import protocol


class ElasticMembers:
    """The host of every node that an elastic job ever had, by node rank.

    A lost node keeps its number. `is_alive` is `GangChannel.is_alive`: True, False, or None for a
    node without any heartbeat at the lead.
    """

    def __init__(
        self,
        start: protocol.StartNode,
        is_alive: Callable[[int], bool | None],
        now: float,
    ) -> None:
        self._max_nodes = 0  # this agent admits no host
        if start.membership is not None and start.lead:
            self._max_nodes = start.terms.max_nodes
        self._is_alive = is_alive
        self._hosts = list(start.hosts)
        self._admitted_at = [now] * len(start.hosts)

    def add(
        self,
        request: protocol.AddNode,
        now: float,
        *,
        is_ending: bool,
        has_returned_node: bool,
    ) -> protocol.NodeAdded:
        """Admit a host as one more node.

        `has_returned_node`: all ranks of a node have returned. Then torchrun would restart the
        ranks of the other nodes for the new host, and they would wait forever for that node. Raises
        ValueError, with a message for the user, if it can't be admitted.
        """
        if not self._max_nodes:
            raise ValueError(
                "this job is not elastic, or its first host is another one"
            )
        if is_ending:
            raise ValueError("it is about to end")
        if has_returned_node:
            raise ValueError("all ranks of one of its hosts have returned")
        present = [
            host for node, host in enumerate(self._hosts) if self._is_present(node, now)
        ]
        if request.host in present:
            raise ValueError(f"{request.host} is a node of this job")
        if len(present) >= self._max_nodes:
            raise ValueError(
                f"it has {len(present)} nodes, and --nnodes allows no more"
            )
        self._hosts.append(request.host)
        self._admitted_at.append(now)
        return protocol.NodeAdded(
            request_id=request.request_id, hosts=tuple(self._hosts)
        )

    def _is_present(self, node: int, now: float) -> bool:
        if node == 0:
            return True  # the lead itself
        is_alive = self._is_alive(node)
        if is_alive is None:
            return now - self._admitted_at[node] < FORM_S  # it may still be starting
        return is_alive
