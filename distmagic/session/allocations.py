"""What one kernel has of systems that give hosts: asked for once, used by every cell that asks for the same, and ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmagic.errors import AllocationEnded, RunError
from distmagic.request.access import Access
from distmagic.request.allocation import HostsRequest
from distmagic.request.hosts import Host
from distmagic.systems.protocol import Connect, Held, Pool, hosts_of
from distmagic.transports import Transport
from distmagic.transports.asking import Asker


class Allocations:
    """Used by the main thread, but for `transport`."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._pools: dict[str, Pool] = {}
        self._all: list[Held] = []

    def pool(self, system: str) -> Any:
        """Return this kernel's `Pool`: its allocations or clusters of a system."""
        if system not in self._pools:
            self._pools[system] = hosts_of(system).pool(self._connect)
        return self._pools[system]

    @property
    def alive(self) -> tuple[Held, ...]:
        """Those that can still be used, the oldest first."""
        self._all = [one for one in self._all if one.is_alive]
        return tuple(self._all)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The nodes of all of them."""
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
        """Return what a cell asks for: one that is held, or a new one, which is pending.

        Raises `UsageError` where the scheduler refuses it, and `Unreachable`.
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
        """Return the way to a node. Raises `AllocationEnded` if it is ours no longer."""
        for one in self._all:
            if one.source == host.allocation:
                return one.transport(host, access, asker)
        assert host.allocation is not None
        raise AllocationEnded(host.allocation.ended, host.allocation.cure)

    def advise(self, hosts: Sequence[Host], error: RunError) -> None:
        """Have the error of a run on these hosts say what to do, as far as their allocation has part in it."""
        sources = {host.allocation for host in hosts}
        for one in self._all:
            if one.source in sources:
                one.advise(error)

    def end(self) -> None:
        """Give all hosts back, whatever runs there, and close the connections to log-in nodes."""
        for one in self._all:
            one.end()
        self._forget()

    def leave(self) -> None:
        """Give all hosts back on which no job runs, and close the connections to log-in nodes."""
        for one in self._all:
            one.leave()
        self._forget()

    def _forget(self) -> None:
        self._all = []
        for pool in self._pools.values():
            pool.close()
