"""Hosts over SSH with paramiko: one connection for each host, a channel for each process, shared
jump hosts.

Host --resolve--> Resolved --open a stream--> handshake, host key --> log in --> SshSession
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from operator import attrgetter

from distmagic.errors import AuthenticationError, HostError, UsageError
from distmagic.request.access import Access
from distmagic.request.hosts import Host
from distmagic.transports import troubles
from distmagic.transports.asking import Asker
from distmagic.transports.local import connecting_program
from distmagic.transports.ssh.agent import KeyAgent
from distmagic.transports.ssh.auth import LogIn
from distmagic.transports.ssh.client import SshSession
from distmagic.transports.ssh.config import Resolved, resolve
from distmagic.transports.ssh.config_lines import SSH_PORT
from distmagic.transports.ssh.deadline import Deadline
from distmagic.transports.ssh.streams import (
    Closable,
    ProxyProcess,
    Stream,
    dial,
    run_proxy,
)

# What tells hops of a route apart.
_PLACE = attrgetter("hostname", "port", "user", "jumps")


def connect(
    host: Host, access: Access, asker: Asker, pins: str | None = None
) -> SshSession:
    """Connect and log in.

    With `pins` the host's first key is trusted, and stored in that file: see pins.py. Raises
    `Unreachable`, `HostKeyError`, `AuthenticationError` or `UsageError`, which name the host.
    """
    route = find_route(resolve(host, access.ssh_config), access.ssh_config)
    if pins is not None:
        target = replace(
            route[-1],
            host_key_alias=host.name,
            user_known_hosts=(pins,),
            global_known_hosts=(),
            is_pinned=True,
        )
        route = (*route[:-1], target)
    try:
        return _Attempt(access=access, asker=asker, route=route).run()
    except troubles.Trouble as trouble:
        raise trouble.for_host(host.name) from trouble.__cause__
    except HostError as error:
        if error.host == host.name:
            raise
        what = error.message.removeprefix(f"{error.host}: ")
        raise AuthenticationError(
            host.name, f"the jump host {error.host} {what}", error.hint
        ) from None


def find_route(target: Resolved, ssh_config: str | None) -> tuple[Resolved, ...]:
    """Return all hops to `target`, which is the last. Raises `UsageError` for a cycle.

    The first jump host in a ProxyJump line is reached by its own ProxyJump or ProxyCommand. Each
    later one is reached through those before it in the line.
    """
    route = [target]
    while route[0].jumps:
        *before, last = route[0].jumps
        hop = resolve(last, ssh_config)
        if before:
            hop = replace(hop, jumps=tuple(before), proxy_command=None)
        if _PLACE(hop) in map(_PLACE, route):
            hint = "Its own Host block needs ProxyJump none."
            raise UsageError(
                f"{target.name}: ProxyJump leads in a circle at {last.name}.", hint
            )
        route.insert(0, hop)
    return tuple(route)


@dataclass(kw_only=True)
class _Attempt:
    """One attempt to connect to the last hop of `route`, and the objects that it has opened."""

    access: Access
    asker: Asker
    route: tuple[Resolved, ...]
    is_jump: bool = False
    opened: list[Closable] = field(default_factory=list)
    agent: KeyAgent | None = None

    @property
    def resolved(self) -> Resolved:
        """The resolved host of this connection."""
        return self.route[-1]

    def run(self) -> SshSession:
        """Return the session, which closes all that it needs.

        Raises `Trouble` or the asker's errors.
        """
        try:
            if self.resolved.proxy_command is None:
                return self._connected()
            with connecting_program:
                return self._connected()
        except troubles.Trouble as trouble:
            resolved = self.resolved
            host = Host(
                name=resolved.name,
                user=resolved.user,
                port=resolved.port if resolved.port != SSH_PORT else None,
            )
            trouble.log_in_by(self.access.ssh_options + host.login)
            raise

    def _connected(self) -> SshSession:
        seconds = min(
            self.access.connect_timeout_s,
            self.resolved.connect_timeout_s or self.access.connect_timeout_s,
        )
        with Deadline(seconds, self._abort) as deadline:
            try:
                session = self._session(deadline)
            except BaseException:
                self._abort()
                if deadline.is_over:
                    raise self._too_late(seconds) from None
                raise
        if deadline.is_over:
            raise self._too_late(seconds)
        session.watch()
        self.opened.remove(session)
        session.under = self.opened
        return session

    def _too_late(self, seconds: float) -> troubles.Trouble:
        if self.agent is not None and self.agent.is_signing:
            return troubles.silent_agent(str(self.agent.path), seconds)
        return troubles.no_answer(self._where(), seconds, self._step())

    def _step(self) -> str:
        """Return the current step of the connection."""
        for thing in self.opened:
            if isinstance(thing, SshSession):
                return "key" if thing.has_banner else "banner"
        return "TCP"

    def _session(self, deadline: Deadline) -> SshSession:
        resolved, where = self.resolved, self._where()
        stream = self._stream(deadline)
        session = SshSession(stream, where, deadline.seconds)
        self._keep(session, deadline)
        try:
            session.handshake(resolved)
        except troubles.Trouble as trouble:
            for proxy in self.opened:
                if (
                    isinstance(proxy, ProxyProcess)
                    and not session.is_active
                    and (said := proxy.last_words())
                ):
                    raise troubles.BROKEN(
                        where, f"its ProxyCommand reports: {said}"
                    ) from trouble
            raise
        self.agent = KeyAgent(resolved.identity_agent)
        self._keep(self.agent, deadline)
        LogIn(
            session=session,
            resolved=resolved,
            asker=self.asker,
            agent=self.agent,
            deadline=deadline,
        ).run()
        self.opened.remove(self.agent)
        return session

    def _stream(self, deadline: Deadline) -> Stream:
        resolved = self.resolved
        if resolved.jumps:
            with deadline.paused():  # the jump host has its own time limit
                # Connect to the last of the jump hosts through those before it.
                attempt = _Attempt(
                    access=self.access,
                    asker=self.asker,
                    route=self.route[:-1],
                    is_jump=True,
                )
                key = tuple(replace(hop, name="", warnings=()) for hop in attempt.route)
                use = _JumpUse(key, attempt.run)
                self.opened.append(use)
            return use.session.open_stream(
                resolved.hostname, resolved.port, self._where()
            )
        stream: Stream
        if resolved.proxy_command is not None:
            stream, process = run_proxy(resolved.proxy_command, self._where())
            self._keep(process, deadline)
        else:
            stream = dial(resolved.hostname, resolved.port, self._where(), deadline)
        self._keep(stream, deadline)
        return stream

    def _keep(self, thing: Closable, deadline: Deadline) -> None:
        self.opened.append(thing)
        if deadline.is_over:  # it expired too late for `_abort`
            thing.close()

    def _abort(self) -> None:
        for thing in reversed(self.opened[:]):
            thing.close()

    def _where(self) -> str:
        resolved = self.resolved
        place = f"{resolved.hostname} port {resolved.port}"
        if not self.is_jump:
            return place
        is_named_so = resolved.name == resolved.hostname
        return (
            f"jump host {place}"
            if is_named_so
            else f"jump host {resolved.name} ({place})"
        )


# ---- jump hosts: all hosts that use one share its connection, so that the user enters a one-time
# password once


@dataclass(kw_only=True, eq=False)
class _Jump:
    """A jump host's session, and the number of connections that use it."""

    future: Future[SshSession] = field(default_factory=Future)
    users: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether it is open, or still being connected; a failed one is no longer kept."""
        return not self.future.done() or self.future.result().is_active


_jumps: dict[object, _Jump] = {}  # by the configuration they were made from
_changing_jumps = threading.Lock()


class _JumpUse:
    """The use of a jump host's `session` by one connection, until `close`.

    The first one makes it; others wait. An error of `make` is raised in every waiting thread.
    """

    def __init__(self, key: object, make: Callable[[], SshSession]) -> None:
        with _changing_jumps:
            jump = _jumps.get(key)
            is_mine = jump is None or not jump.is_usable
            if jump is None or is_mine:
                jump = _jumps[key] = _Jump()
            jump.users += 1
        if is_mine:
            try:
                jump.future.set_result(make())
            except BaseException as error:  # noqa: BLE001 - raised again by every `future.result()`
                with _changing_jumps:
                    if _jumps.get(key) is jump:
                        del _jumps[key]
                jump.future.set_exception(error)
        self.session = jump.future.result()
        self._key, self._jump = key, jump
        self._is_over = False

    def close(self) -> None:
        """End the use, and with the last one the session. Safe to call twice."""
        with _changing_jumps:
            if self._is_over:
                return
            self._is_over = True
            self._jump.users -= 1
            if self._jump.users:
                return
            if _jumps.get(self._key) is self._jump:
                del _jumps[self._key]
        self.session.close()
