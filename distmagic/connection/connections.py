"""The kernel's open connections: one for each host and way of reaching it, used again by the next run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from distmagic.connection.idle_links import IdleLinks
from distmagic.connection.link import Link
from distmagic.errors import ConnectionLost, HostError, ProtocolError, Unreachable
from distmagic.payload.blobs import LocalBlob
from distmagic.remote.wire import protocol
from distmagic.request.hosts import Host
from distmagic.request.spec import Access
from distmagic.transports import Transport
from distmagic.transports.prompts import Asker


class Connections:
    """The kernel's open connections, one for each host and way of reaching it. Safe to use from threads."""

    def __init__(self, connect: Callable[[Host, Access, Asker], Transport]) -> None:
        self._connect = connect
        self._idle = IdleLinks()
        self._open: dict[tuple[Host, Access], Transport] = {}
        self._connecting: dict[tuple[Host, Access], threading.Lock] = {}
        self._lock = threading.Lock()  # of the two tables above; never held while something blocks

    def link(self, host: Host, access: Access, asker: Asker, python: str, bundle: LocalBlob) -> Link:
        """Open a new link to a host, over the open connection if there is one that still works."""
        known = self._known(host, access)
        if known is not None:
            try:
                return Link.open(host, known, python, bundle)
            except (ConnectionLost, Unreachable):
                self.drop(host, access, known)
        return Link.open(host, self._connected(host, access, asker), python, bundle)

    def _known(self, host: Host, access: Access) -> Transport | None:
        with self._lock:
            return self._open.get(_key(host, access))

    def _connected(self, host: Host, access: Access, asker: Asker) -> Transport:
        """Return the connection to a host. Of several threads that want it at once one connects; the others wait."""
        key = _key(host, access)
        with self._lock:
            connecting = self._connecting.setdefault(key, threading.Lock())
        with connecting:
            known = self._known(host, access)
            if known is not None:
                return known
            transport = self._connect(host, access, asker)
            with self._lock:
                self._open[key] = transport
            return transport

    def take_idle(self, host: Host, access: Access, asker: Asker, python: str, bundle: LocalBlob) -> Link:
        """Return the idle link of a host, if there is one that still works, else a new link."""
        link = self._idle.take((*_key(host, access), python))
        if link is not None:
            try:
                link.host = host  # it may have other slots now
                link.facts = link.query(protocol.GetFacts(), protocol.Facts)
            except (ConnectionLost, HostError, ProtocolError):
                link.close()
            else:
                return link
        return self.link(host, access, asker, python, bundle)

    def rest(self, access: Access, python: str, link: Link) -> None:
        """Keep a link for the next run, if its host keeps something loaded; else end it."""
        self._idle.give((*_key(link.host, access), python), link)

    def drop(self, host: Host, access: Access, broken: Transport) -> None:
        """Close a connection that is broken. If another one to the host is open by now, that one stays."""
        with self._lock:
            if self._open.get(_key(host, access)) is broken:
                del self._open[_key(host, access)]
        broken.close()

    def cool(self) -> set[str]:
        """End what hosts with an idle link keep loaded; return their names."""
        return self._idle.close()

    def close(self) -> None:
        """End what hosts keep loaded, and close all connections."""
        self._idle.close()
        with self._lock:
            transports, self._open = list(self._open.values()), {}
        for transport in transports:
            transport.close()


def _key(host: Host, access: Access) -> tuple[Host, Access]:
    """Return what two runs must have in common to share a connection: host, and way of reaching it."""
    return replace(host, slots=None), Access(ssh_config=access.ssh_config, ssh_command=access.ssh_command)


def connect(host: Host, access: Access, asker: Asker) -> Transport:
    """Return a transport to a host: this machine without SSH, the system's client if one is named, else paramiko."""
    if host.is_local:
        from distmagic.transports import local

        return local.connect()
    if access.ssh_command:
        from distmagic.transports import ssh_command

        return ssh_command.connect(host, access, asker)
    from distmagic.transports.ssh import ssh

    return ssh.connect(host, access, asker)
