"""The playground's process: one small SSH server for each host, all on 127.0.0.1.

It is a separate process, so that a busy kernel does not slow it down. Its directory is the current
one; its arguments are the number of hosts, and the process that it ends with, 0 for none. It writes
a line to stdout once the hosts listen. Each line on the Unix socket `orders` of its directory
changes the state of one host, [verb, name], or ends it, ["stop", ""]; the answer is the state of
all. It ends, with all its processes and its directory, on `stop` or SIGTERM, and when its parent is
gone; one that is kept has no parent, and ends 2 h after the last use. (Linux's PR_SET_PDEATHSIG
would fire when the *thread* that started it ends.) Only this file imports asyncssh.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shlex
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import field
from functools import partial
from pathlib import Path

import asyncssh
from asyncssh.forward import SSHForwarder

from distmagic.remote.frozen import frozen
from distmagic.remote.system import processes

GRACE_S = 5.0  # between SIGTERM and SIGKILL at the end
_GIVE_UP_S = 5.0
_POLL_S = 0.5
_IDLE_S = 7200.0  # of one that is kept
_STATES = {
    "freeze": "frozen",
    "thaw": "up",
    "cut": "cut",
    "heal": "up",
    "off": "off",
    "on": "up",
}
_PASSED_ON = ("LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
# NCCL refuses ranks of two hosts on one GPU. So hosts have none, unless this variable names some.
_GPUS = "DISTMAGIC_PLAYGROUND_GPUS"


@frozen
class SharedByHosts:
    """Data shared by all hosts: the playground's directory, its user, the key that may log in,
    running commands.
    """

    directory: Path
    user: str
    client_key: asyncssh.SSHKey
    # By pid, until reaped; the event is set once the exit code is known.
    commands: dict[int, tuple[subprocess.Popen[bytes], asyncio.Event]] = field(
        default_factory=dict
    )

    def environment(self, home: Path, connection: str) -> dict[str, str]:
        """Return the environment of a command, like sshd's, with the kernel's Python first in
        PATH.

        `connection` has both ends of the SSH connection, each with its port.
        """
        kept = {}
        for name, value in os.environ.items():
            if name in _PASSED_ON or name.startswith("LC_"):
                kept[name] = value
        if site.ENABLE_USER_SITE:
            kept["PYTHONUSERBASE"] = site.getuserbase()  # the home differs
        return kept | {
            "CUDA_VISIBLE_DEVICES": os.environ.get(_GPUS, "-1"),
            "HOME": str(home),
            "USER": self.user,
            "LOGNAME": self.user,
            "SHELL": "/bin/sh",
            "PATH": f"{self.directory}/bin:{os.environ.get('PATH', os.defpath)}",
            "SSH_CONNECTION": connection,
        }


class PlayedHost:
    """One host: its home, its server, and its state: up, frozen, cut or off."""

    def __init__(self, shared: SharedByHosts, home: Path) -> None:
        self.shared, self.home = shared, home
        self.state = "up"
        self.port = 0
        self.connections: set[asyncssh.SSHServerConnection] = set()
        self.thawed = asyncio.Event()
        self.thawed.set()
        self._key = asyncssh.generate_private_key("ssh-ed25519")

    async def listen(self) -> None:
        """Start the server, on the same port as before if there was one."""
        self._acceptor = await asyncssh.listen(
            "127.0.0.1",
            self.port,
            server_factory=lambda: _Server(self),
            server_host_keys=[self._key],
            encoding=None,
            line_editor=False,
            allow_pty=False,
            agent_forwarding=False,
            x11_forwarding=False,
        )
        self.port = self._acceptor.get_port()

    def known_hosts_line(self) -> str:
        """Return this host's line for known_hosts."""
        public_key = self._key.export_public_key().decode().strip()
        return f"[127.0.0.1]:{self.port} {public_key}\n"

    def processes(self) -> list[processes.ProcessInfo]:
        """Return the processes of this host: descendants of this process with the host's home."""
        found = []
        for process in processes.descendants(os.getpid()):
            try:
                variables = Path(f"/proc/{process.pid}/environ").read_bytes()
            except OSError:
                continue  # it has just ended
            if f"HOME={self.home}".encode() in variables.split(b"\0"):
                found.append(process)
        return found

    async def suffer(self, verb: str) -> None:
        """Change the state: freeze, cut or off, and back by thaw, heal or on."""
        if self.state == _STATES[verb]:
            return
        if self.state != "up" and _STATES[verb] != "up":
            await self.suffer("on")
        self.state = _STATES[verb]
        if self.state == "up":
            self.thawed.set()
            for process in self.processes():
                processes.send(process, signal.SIGCONT)
            if not self._acceptor.sockets:
                await self.listen()
        elif self.state == "frozen":
            self.thawed.clear()
            await self._send_all(signal.SIGSTOP, "Tt")
        else:
            self._acceptor.close()
            for connection in list(self.connections):
                connection.abort()
            if self.state == "off":
                await self._send_all(signal.SIGKILL, "")

    async def _send_all(self, number: int, done: str) -> None:
        """Signal repeatedly until every process is gone or in a state of `done`: they may start
        others meanwhile.
        """
        while left := [one for one in self.processes() if one.state not in done]:
            for process in left:
                processes.send(process, number)
            await asyncio.sleep(0.01)


class _Server(asyncssh.SSHServer):  # type: ignore[misc]
    """One connection: it accepts one key and one user.

    Forwarding is allowed, so a host can be another's jump host.
    """

    # ruff: noqa: ARG002 - asyncssh decides what its callbacks are given

    def __init__(self, host: PlayedHost) -> None:
        self._host = host

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._conn = conn
        self._host.connections.add(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        self._host.connections.discard(self._conn)

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        """Accept repeated service requests, which paramiko sends at each attempt, as sshd does.

        Called before each answer.
        """
        self._conn._next_service = b"ssh-userauth"  # asyncssh hangs up otherwise
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        shared = self._host.shared
        return username == shared.user and key == shared.client_key

    def session_requested(self) -> _Process:
        return _Process(self._host)

    def connection_requested(
        self, dest_host: str, dest_port: int, orig_host: str, orig_port: int
    ) -> Awaitable[SSHForwarder]:
        return self._forward(dest_host, dest_port)

    async def _forward(self, host: str, port: int) -> SSHForwarder:
        """Connect a channel to a port.

        asyncssh alone loses what the port's end has sent before the channel is open, such as an
        SSH server's first line.
        """
        # ruff: noqa: SLF001 - there is no other way to those bytes
        channel_end = await self._conn.forward_connection(host, port)
        port_end = channel_end._peer

        def send_early_bytes() -> None:
            has_lost_port = port_end._transport is None
            if has_lost_port:
                channel_end._peer = None
            channel_end.write(port_end._inpbuf)
            if port_end.was_eof_received():
                channel_end.write_eof()
            if has_lost_port:
                channel_end.close()

        channel_end.session_started = send_early_bytes
        return channel_end


class _Process(asyncssh.SSHServerProcess):  # type: ignore[misc]
    """One channel: asyncssh connects it to a command's pipes.

    The command has its own session, and no terminal.
    """

    def __init__(self, host: PlayedHost) -> None:
        super().__init__(
            self._start, sftp_factory=None, sftp_version=3, allow_scp=False
        )
        self._host = host

    async def _start(self, _process: asyncssh.SSHServerProcess) -> None:
        # The channel may be gone. The command has got end of file and ends by itself; an exception
        # from this function would close the whole connection, including the client's other
        # channels.
        with suppress(OSError, asyncssh.Error):
            await self._run()

    async def _run(self) -> None:
        """Start the command and wait for its end and the end of its output, which its children may
        hold open.
        """
        await self._host.thawed.wait()
        client, server = map(self.get_extra_info, ("peername", "sockname"))
        host = self._host
        connection = " ".join(map(str, (*client[:2], *server[:2])))
        env = host.shared.environment(host.home, connection)
        argv = ["/bin/sh"] if self.command is None else ["/bin/sh", "-c", self.command]
        pipe = subprocess.PIPE
        try:
            command = subprocess.Popen(  # noqa: ASYNC220 - it returns after the exec
                argv,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                bufsize=0,
                env=env,
                cwd=host.home,
                start_new_session=True,
            )
        except OSError as error:  # the home is gone, or there are too many processes
            self.stderr.write(f"playground: {error}\n".encode())
            self.exit(255)
            return
        ended = asyncio.Event()
        host.shared.commands[command.pid] = command, ended
        # The end of one output is not the end of the other, so neither may send the channel's end
        # of file.
        await self.redirect(
            command.stdin, command.stdout, command.stderr, send_eof=False
        )
        await ended.wait()
        await self.stdout.drain()
        await self.stderr.drain()
        if command.returncode >= 0:
            self.exit(command.returncode)
        else:
            # As sshd calls a signal without a name: those of real time.
            name = "SIG@openssh.com"
            with suppress(ValueError):
                name = signal.Signals(-command.returncode).name.removeprefix("SIG")
            self.exit_with_signal(name)

    def eof_received(self) -> bool:
        """End the command's input in a separate turn of the event loop.

        When a full pipe has room again, asyncio accepts more data. If the end came in that same
        turn, asyncio would close the pipe with data still waiting.
        """
        asyncio.get_running_loop().call_soon(super().eof_received)
        return True  # the output stays open


# ---- the hosts


async def serve(directory: Path, count: int, parent: int) -> None:
    """Serve `count` hosts below `directory`, for the life of the process `parent`; 0: until it is
    idle.
    """
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    key = asyncssh.generate_private_key("ssh-ed25519", comment="distmagic playground")
    key_file = directory / "id_ed25519"
    key_file.touch(mode=0o600)
    key_file.write_bytes(key.export_private_key())
    shared = SharedByHosts(
        directory=directory, user=_user(), client_key=key.convert_to_public()
    )
    loop.add_signal_handler(signal.SIGCHLD, _reap, shared)
    _make_python(directory / "bin")
    hosts = {}
    for number in range(1, count + 1):
        home = directory / f"node{number}"
        home.mkdir(mode=0o700)
        hosts[home.name] = PlayedHost(shared, home)
        await hosts[home.name].listen()
    lines = [host.known_hosts_line() for host in hosts.values()]
    (directory / "known_hosts").write_text("".join(lines))
    obey = partial(_obey, hosts, asyncio.Lock(), over)
    await asyncio.start_unix_server(obey, "orders")  # this process works in `directory`
    ports = [host.port for host in hosts.values()]
    (directory / "ssh_config").write_text(ssh_config(directory, ports, shared.user))
    print("ready", flush=True)  # noqa: T201
    ending = asyncio.create_task(_gone(parent) if parent else _idle(hosts))
    ending.add_done_callback(lambda _: over.set())
    try:
        await over.wait()
    finally:
        ending.cancel()
        for host in hosts.values():
            host.thawed.set()
        end_all()


async def _obey(
    hosts: dict[str, PlayedHost], turn: asyncio.Lock, over: asyncio.Event,
    orders: asyncio.StreamReader, answers: asyncio.StreamWriter,
) -> None:  # fmt: skip
    """Carry out an order, and answer with [name, state, number of processes] of all hosts.

    The order to stop gets no answer.
    """
    line = await orders.readline()
    verb, name = json.loads(line or '["", ""]')
    if verb == "stop":
        over.set()
        await asyncio.Event().wait()
    async with turn:
        if verb:
            await hosts[name].suffer(verb)
        rows = [[name, one.state, len(one.processes())] for name, one in hosts.items()]
    with suppress(OSError):  # nobody reads the answer any more
        answers.write(json.dumps(rows).encode() + b"\n")
        await answers.drain()
        answers.close()


async def _gone(parent: int) -> None:
    """Return soon after the parent is gone."""
    while os.getppid() == parent:  # noqa: ASYNC110 - no event reports it
        await asyncio.sleep(_POLL_S)


async def _idle(hosts: dict[str, PlayedHost]) -> None:
    """Return when for `_IDLE_S` no host had a connection or a process."""
    used_s = processes.up_s()
    while processes.up_s() - used_s < _IDLE_S:
        await asyncio.sleep(min(_IDLE_S / 10, 60.0))
        if any(one.connections or one.processes() for one in hosts.values()):
            used_s = processes.up_s()


def _make_python(folder: Path) -> None:
    """Make `python3` start the kernel's interpreter, which runs this process, too.

    A symbolic link would lose the virtual environment.
    """
    folder.mkdir()
    start = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
    for name in ("python", "python3"):
        (folder / name).write_text(start)
        (folder / name).chmod(0o755)


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run with a user ID that is not in passwd
        return f"user{os.getuid()}"


def ssh_config(directory: Path, ports: Sequence[int], user: str) -> str:
    """Return the OpenSSH configuration of hosts node1, node2, ... on these `ports` of this machine.

    Pure.
    """
    text = f"""\
Host node*
    HostName 127.0.0.1
    User {user}
    IdentityFile "{directory}/id_ed25519"
    IdentitiesOnly yes
    IdentityAgent none
    PreferredAuthentications publickey
    UserKnownHostsFile "{directory}/known_hosts"
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""
    for number, port in enumerate(ports, 1):
        text += f"\nHost node{number}\n    Port {port}\n"
    return text


# ---- the end


def _reap(shared: SharedByHosts) -> None:
    for pid, status in processes.reap().items():
        if pid in shared.commands:
            command, ended = shared.commands.pop(pid)
            command.returncode = os.waitstatus_to_exitcode(status)
            ended.set()


def end_all() -> None:
    """End all processes of the hosts: SIGTERM, and SIGKILL after `GRACE_S`."""
    begun = time.monotonic()
    # Each process gets SIGTERM once; a pid alone may be reused.
    terminated = set()
    while left := processes.descendants(os.getpid()):
        past_s = time.monotonic() - begun
        if past_s > GRACE_S + _GIVE_UP_S:
            return
        for process in left:
            name = (process.pid, process.started)
            if past_s > GRACE_S:
                processes.send(process, signal.SIGKILL)
            elif name not in terminated:
                terminated.add(name)
                processes.send(process, signal.SIGTERM)
                processes.send(process, signal.SIGCONT)  # for a frozen host
        time.sleep(0.02)
        processes.reap()


def main() -> None:
    """Serve hosts in the current directory, and clean up."""
    count, parent = map(int, sys.argv[1:])
    directory = Path.cwd()
    processes.become_subreaper()
    try:
        asyncio.run(serve(directory, count, parent))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
