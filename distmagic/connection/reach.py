"""Reaching hosts: all at once, in the background, while the notebook's own statements still run.

The kernel keeps one connection a host and uses it again for the next run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any

from distmagic.connection.idle_links import IdleLinks
from distmagic.connection.link import Link
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import (
    Cancelled,
    ConnectionLost,
    DistmagicError,
    HostError,
    HostErrors,
    ProtocolError,
    Unreachable,
)
from distmagic.payload.blobs import LocalBlob
from distmagic.remote.records import expiry
from distmagic.remote.wire import protocol
from distmagic.request.hosts import Host
from distmagic.request.spec import Access
from distmagic.transports import Transport
from distmagic.transports.prompts import Asker

Watch = Callable[[Sequence["Future[Link]"]], None]
PARALLEL = 16  # more threads are no faster: the servers' forking is the cost


class Connections:
    """The kernel's open connections, one for each host and way of reaching it. Safe to use from threads."""

    def __init__(self, connect: Callable[[Host, Access, Asker], Transport]) -> None:
        self._connect = connect
        self._resting = IdleLinks()
        self._open: dict[tuple[Host, Access], Transport] = {}
        self._lock = threading.Lock()

    def link(self, host: Host, access: Access, asker: Asker, python: str, bundle: LocalBlob) -> Link:
        """Return a new conversation with a host, over the open connection if there is one that still works."""
        key = _key(host, access)
        with self._lock:
            known = self._open.get(key)
        if known is not None:
            try:
                return Link.open(host, known, python, bundle)
            except (ConnectionLost, Unreachable):
                self.drop(host, access)
        transport = self._connect(host, access, asker)
        with self._lock:
            self._open[key] = transport
        return Link.open(host, transport, python, bundle)

    def rested(self, host: Host, access: Access, asker: Asker, python: str, bundle: LocalBlob) -> Link:
        """Return the conversation that was kept open for a host, else a new one."""
        link = self._resting.take((*_key(host, access), python))
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
        """Keep a conversation open for the next run, if its host keeps something loaded; else end it."""
        self._resting.give((*_key(link.host, access), python), link)

    def drop(self, host: Host, access: Access) -> None:
        """Close a host's connection."""
        with self._lock:
            transport = self._open.pop(_key(host, access), None)
        if transport is not None:
            transport.close()

    def cool(self) -> set[str]:
        """End what hosts keep loaded with which a conversation rests; return their names."""
        return self._resting.close()

    def close(self) -> None:
        """End what hosts keep loaded, and close all connections."""
        self._resting.close()
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


class Reaching:
    """Conversations with hosts that are being opened. `wait` returns them all, or says what is wrong with each.

    `pythons` are for all that are `known`: after the hosts that are reached may come `spare` ones, which a job may yet
    come to.
    """

    def __init__(
        self, hosts: tuple[Host, ...], access: Access, asker: NotebookAsker, connections: Connections,
        pythons: tuple[str, ...], open_link: Callable[[Host, str], Link], spare: tuple[Host, ...] = (),
    ) -> None:  # fmt: skip
        self.hosts, self.access, self.pythons = hosts, access, pythons
        self.known = (*hosts, *spare)
        self.asker, self._connections = asker, connections
        self.absent: dict[int, str] = {}  # hosts that a job begins without, by place, and what is wrong with them
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="distmagic-reach")
        self._links = [self._pool.submit(open_link, *pair) for pair in zip(hosts, pythons, strict=False)]
        self._pool.submit(expiry.tidy)  # this machine keeps payloads too

    def rest(self, node_rank: int, link: Link) -> None:
        """Give back a conversation of which nothing more is to come."""
        self._connections.rest(self.access, self.pythons[node_rank], link)

    def wait(self, watch: Watch | None = None, enough: int | None = None) -> tuple[Link, ...]:
        """Return one open `Link` a host, in order. Raises `HostErrors`, or the one error; then all links are closed.

        Where `enough` hosts are there, those that are out of reach are left out: see `present` and `absent`. Questions
        (passphrases, one-time passwords) are asked meanwhile, on this thread. `watch` waits in place of this, and shows
        how far it is. Raises `Cancelled` for an interrupt.
        """
        try:
            (watch or self._watch)(self._links)
        except KeyboardInterrupt:
            waiting = ", ".join(h.name for h, link in zip(self.hosts, self._links, strict=True) if not link.done())
            self.cancel()
            hint = f"No answer had come yet from {waiting}." if waiting else ""
            raise Cancelled("Interrupted while the hosts were being reached; nothing was started.", hint) from None
        except BaseException:
            self.cancel()
            raise
        errors = {place: error for place, link in enumerate(self._links) if (error := link.exception()) is not None}
        there = [host for place, host in enumerate(self.hosts) if place not in errors]
        is_enough = enough and len(there) >= enough and not all(host.is_local for host in there)  # whom none can dial
        if errors and not (is_enough and all(map(_is_out_of_reach, errors.values()))):
            self.cancel()
            raise join_errors(list(errors.values()))
        self._pool.shutdown(wait=False)
        self.absent = {place: str(error).partition("\n")[0] for place, error in errors.items()}
        return tuple(self._links[place].result() for place in self.present)

    @property
    def present(self) -> tuple[int, ...]:
        """The places in `hosts` of those that `wait` has returned."""
        return tuple(place for place in range(len(self.hosts)) if place not in self.absent)

    def _watch(self, links: Sequence[Future[Link]]) -> None:
        while wait(links, 0.02).not_done:
            self.asker.serve(0.02)

    def cancel(self) -> None:
        """Give up: nothing is kept but the connections, and what hosts keep loaded."""
        self.asker.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for node_rank, link in enumerate(self._links):
            link.add_done_callback(partial(self._give_back, node_rank))

    def _give_back(self, node_rank: int, future: Future[Link]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        link = future.result()
        if link.kept is None:
            link.close()
        else:
            self.rest(node_rank, link)


def _is_out_of_reach(error: BaseException) -> bool:
    """Whether a host may come back by itself: not one that refuses us."""
    return isinstance(error, (Unreachable, ConnectionLost))


def join_errors(errors: list[BaseException]) -> BaseException:
    """Return the one error, or one that names all hosts. What is no error of ours comes first: it is a bug."""
    ours = tuple(error for error in errors if isinstance(error, DistmagicError))
    if len(ours) < len(errors):
        return next(error for error in errors if not isinstance(error, DistmagicError))
    return HostErrors(ours) if len(ours) > 1 else ours[0]


def raise_first(futures: Sequence[Future[Any]]) -> None:
    """Raise what went wrong, if anything did: the one error, or one that names all hosts."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise join_errors(errors)
