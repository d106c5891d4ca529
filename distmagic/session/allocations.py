"""A kernel's hosts from schedulers: requested once, shared by cells with the same request, and
released.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmagic.connection.connections import Connect
from distmagic.diagnosis.finding import Finding
from distmagic.errors import AllocationEnded, RunError
from distmagic.request.access import Access
from distmagic.request.allocation import HostsRequest
from distmagic.request.hosts import Host, Hosts
from distmagic.systems.protocol import Held, Pool, hosts_of
from distmagic.transports import Transport
from distmagic.transports.asking import Asker


class Allocations:
    """The allocations of a kernel. Only the main thread uses it, except for `transport`."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._pools: dict[str, Pool] = {}
        self._all: list[Held] = []

    def pool(self, system: str) -> Any:
        """Return this kernel's `Pool` of a system: its allocations or clusters."""
        if system not in self._pools:
            self._pools[system] = hosts_of(system).pool(self._connect)
        return self._pools[system]

    @property
    def alive(self) -> tuple[Held, ...]:
        """The usable ones, oldest first."""
        self._all = [one for one in self._all if one.is_alive]
        return tuple(self._all)

    @property
    def hosts(self) -> Hosts:
        """The nodes of all usable ones."""
        return tuple(host for one in self.alive for host in one.hosts)

    def get(
        self,
        request: HostsRequest,
        access: Access,
        asker: Asker,
        owner: str,
        *,
        is_elastic: bool = False,
    ) -> Held:
        """Return the hosts that a cell requests: existing ones with the same request, or a new
        request, which is pending.

        Raises `UsageError` if the scheduler refuses it, and `Unreachable`.
        """
        for one in self.alive:
            if one.fits(request) and one.check(asker):
                return one
        made: Held = self.pool(request.system).get(
            request,
            access,
            asker,
            owner,
            is_elastic=is_elastic,
        )
        self._all.append(made)
        return made

    def transport(self, host: Host, access: Access, asker: Asker) -> Transport:
        """Return a transport to a node.

        Raises `AllocationEnded` if this kernel no longer has the node.
        """
        for one in self._all:
            if one.source == host.allocation:
                return one.transport(host, access, asker)
        assert host.allocation is not None
        raise AllocationEnded(host.allocation.ended, host.allocation.cure)

    def advise(self, hosts: Sequence[Host], error: RunError) -> None:
        """Add advice to the error of a run on these hosts, as far as their allocation is
        involved.
        """
        sources = {host.allocation for host in hosts}
        for one in self._all:
            if one.source in sources:
                one.advise(error)

    def findings(self, hosts: Sequence[Host], asker: Asker) -> list[Finding]:
        """Return what schedulers report to be wrong with these hosts, for the doctor."""
        sources = {host.allocation for host in hosts}
        held = [one for one in self._all if one.source in sources]
        return [finding for one in held for finding in one.findings(asker)]

    def end(self) -> None:
        """Release all hosts, even if jobs run on them, and close the connections to log-in
        nodes.
        """
        for one in self._all:
            one.end()
        self._forget()

    def leave(self) -> None:
        """Release all hosts without a running job, and close the connections to log-in nodes."""
        for one in self._all:
            one.leave()
        self._forget()

    def _forget(self) -> None:
        self._all = []
        for pool in self._pools.values():
            pool.close()
