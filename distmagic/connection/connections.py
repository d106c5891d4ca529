"""The kernel's open connections: one for each host and way of reaching it, reused by the next
run.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from weakref import WeakSet

from distmagic.connection.idle_links import IdleLinks
from distmagic.connection.link import Link
from distmagic.connection.opening import open_link
from distmagic.connection.parallel import in_parallel
from distmagic.connection.prompts import asker_of
from distmagic.errors import (
    ConnectionLost,
    HostError,
    ProtocolError,
    Unreachable,
    UsageError,
)
from distmagic.payload.bundle import build
from distmagic.remote.frozen import frozen
from distmagic.remote.system import threads
from distmagic.remote.wire import protocol
from distmagic.request.access import Access
from distmagic.request.hosts import LOCALHOST, Host
from distmagic.transports import Transport
from distmagic.transports.asking import Asker
from distmagic.transports.ssh import config

Connect = Callable[[Host, Access, Asker], Transport]
_OPEN_FILES = 1 << 16  # a connection uses two, or eleven with the system's ssh


@frozen
class _Key:
    """A host and the way to reach it.

    After an edit of the SSH configuration the same name may be another machine.
    """

    host: Host
    ssh_config: str | None
    ssh_command: str | None
    config_versions: tuple[config.FileVersion, ...]
    before_python: tuple[str, ...]  # another prefix means another environment


class Connections:
    """The kernel's open connections, one for each host and way of reaching it.

    Safe to use from threads.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._idle = IdleLinks()
        self._open: dict[_Key, Transport] = {}
        self._links: WeakSet[Link] = WeakSet()  # all that were opened over them
        self._opening: list[_Key] = []  # keys of links that are being opened
        self._closings = 0  # how often all connections were closed
        self._connecting: dict[_Key, threading.Lock] = {}
        # Protects the attributes above; never held during a blocking call.
        self._lock = threading.Lock()
        self._owner = os.getpid()
        _allow_many_files()

    def link(self, host: Host, access: Access, asker: Asker) -> Link:
        """Open a new link to a host, over its open connection if that still works.

        A connection that does not work is closed for all runs. A broken link does not prove that: a
        transport's keep-alives end a dead connection within seconds, and then it can start no
        process.
        """
        key = _key(host, access)
        with self._lock:
            self._opening.append(key)
        try:
            link = self._opened(key, host, access, asker)
            with self._lock:
                self._links.add(link)
        finally:
            with self._lock:
                self._opening.remove(key)
        self._end_older(key)
        return link

    def own_link(self, access: Access) -> Link:
        """Open one more link to this machine."""
        with closing(asker_of()) as asker:
            return self.link(LOCALHOST, access, asker)

    def _opened(self, key: _Key, host: Host, access: Access, asker: Asker) -> Link:
        python, bundle = access.interpreter(host), build()
        known = self._open.get(key)
        if known is not None:
            try:
                return open_link(host, known, python, bundle, access)
            except (ConnectionLost, Unreachable):
                self._drop(known)
        transport = self._connected(key, host, access, asker)
        return open_link(host, transport, python, bundle, access)

    def _end_older(self, key: _Key) -> None:
        """End connections to the same host from before an edit of the SSH configuration, unless a
        run uses them.
        """
        with self._lock:
            opened, links = list(self._open.items()), list(self._links)
        for one, transport in opened:
            if one == key:
                return  # the others are newer
            if replace(one, config_versions=key.config_versions) != key:
                continue
            own = [link for link in links if link.transport is transport]
            for link in own:
                idle = self._idle.take((one, link.interpreter))
                if idle is not None:
                    idle.close()
            with self._lock:
                is_used = one in self._opening or any(
                    link.transport is transport and not link.is_closed
                    for link in self._links
                )
                if is_used or self._open.get(one) is not transport:
                    continue
                del self._open[one]
            # On a thread of its own: the machine may be gone.
            threads.begin("run", transport.close)

    def _connected(
        self, key: _Key, host: Host, access: Access, asker: Asker
    ) -> Transport:
        """Return the connection to a host.

        If several threads need it at once, one connects and the others wait.
        """
        with self._lock:
            connecting = self._connecting.setdefault(key, threading.Lock())
        with connecting:
            known = self._open.get(key)
            if known is not None:
                return known
            closings = self._closings
            transport = self._connect(host, access, asker)
            with self._lock:
                is_late = self._closings != closings
                if not is_late:
                    self._open[key] = transport
        if is_late:
            transport.close()
            raise ConnectionLost(f"{host.name}: all connections were closed meanwhile.")
        return transport

    def take_idle(self, host: Host, access: Access, asker: Asker) -> Link:
        """Return the idle link of a host if one still works, else a new link."""
        key = _key(host, access)
        link = self._idle.take((key, access.interpreter(host)))
        if link is None:
            return self.link(host, access, asker)
        try:
            link.host = host  # its number of slots may have changed
            link.facts = link.query(protocol.GetFacts(), protocol.Facts)
        except (ConnectionLost, HostError, ProtocolError):
            link.close()
            return self.link(host, access, asker)
        self._end_older(key)
        return link

    def give_back(self, link: Link) -> None:
        """Keep an unused link idle if its host has warm processes; else close it at once."""
        if link.kept is None or link.is_closed:
            link.close()
        else:
            self.keep_idle(link)

    def keep_idle(self, link: Link) -> None:
        """Keep a link for the next run if its host has warm processes; else end it."""
        transport = link.transport
        # The key under which it was opened: the configuration may give another one now.
        with self._lock:
            keys = [key for key, known in self._open.items() if known is transport]
        if keys:
            self._idle.give((keys[0], link.interpreter), link)
        else:
            link.close()  # its connection was closed

    def _drop(self, broken: Transport) -> None:
        """Close a connection that can start no process.

        A newer connection to the same host stays.
        """
        with self._lock:
            self._open = {
                key: known for key, known in self._open.items() if known is not broken
            }
        broken.close()

    def end_templates(self) -> set[str]:
        """End the warm processes on hosts with an idle link; return the hosts' names."""
        return self._idle.close()

    def close(self) -> None:
        """End warm processes, and close all connections. New ones can be made afterwards."""
        if os.getpid() != self._owner:
            # A forked child runs its parent's atexit functions: the connections are the parent's.
            return
        self._idle.close()
        with self._lock:
            transports = list(self._open.values())
            self._open = {}
            self._closings += 1
        try:
            # In parallel: each waits for the other end to close.
            in_parallel(lambda transport: transport.close(), transports)
        except RuntimeError:  # Python is exiting and starts no threads
            for transport in transports:
                transport.close()


def _allow_many_files() -> None:
    """Raise this process's soft limit of open files, often 1,024, as far as the hard limit
    allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some systems enforce a lower limit than they report.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _key(host: Host, access: Access) -> _Key:
    """Return the key of a connection: two runs share it if their keys are equal."""
    return _Key(
        host=replace(host, slots=None),
        ssh_config=access.ssh_config,
        ssh_command=access.ssh_command,
        config_versions=()
        if host.is_local
        else config.file_versions(access.ssh_config),
        before_python=access.before_python,
    )


def connect(
    host: Host, access: Access, asker: Asker, pins: str | None = None
) -> Transport:
    """Return a transport to a host: direct for this machine, the system's ssh if it is chosen, else
    paramiko.

    With `pins`, paramiko trusts the host's key on first use and stores it in that file. Raises
    `UsageError` if the system's ssh is chosen as well.
    """
    if host.is_local:
        from distmagic.transports import local

        return local.LocalTransport()
    if access.ssh_command:
        from distmagic.transports import ssh_command

        if pins is not None:
            raise UsageError(
                f"{host.name}: its host key is new, and --ssh-command does not keep the first key of a host.",
                "Leave --ssh-command out.",
            )
        return ssh_command.connect(host, access, asker)
    from distmagic.transports.ssh import ssh

    return ssh.connect(host, access, asker, pins)
