"""Hosts over SSH with the system's own client, for configurations that paramiko can't do.

One master a host.

The master connection is a child process that runs `cat` on the host. When this process ends,
however it ends, the child's pipe closes, so `cat` ends and the master with it. Every process on the
host is one more session of the master. The client never asks the user (BatchMode): keys come from
the agent, and a log-in that needs a typed answer needs paramiko.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

from distmagic.errors import ConnectionLost, UsageError
from distmagic.planning import preflight
from distmagic.request.access import Access
from distmagic.request.hosts import Host
from distmagic.transports import Argv, quoting, ssh_words
from distmagic.transports.asking import Asker
from distmagic.transports.local import connecting_program
from distmagic.transports.piped import OpenProcesses, PipedProcess
from distmagic.transports.time_limits import TimeLimit

_READY = "distmagic-ready"
_CLIENT_FAILED = 255
_END_TIMEOUT_S = 2.0
_LONG = 60  # a longer temporary directory leaves too few bytes for the socket's name
_MASTER_END_S = 0.3  # time for a master to end by itself
_OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "ServerAliveInterval=2",
    "ServerAliveCountMax=3",
    "ControlPersist=no",
    "RemoteCommand=none",
    "RequestTTY=no",
    "PermitLocalCommand=no",
    "ClearAllForwardings=yes",  # these are ports alone, so:
    # The master lives for hours, and root on the host could use the agent all the time.
    "ForwardAgent=no",
    "ForwardX11=no",
    "LogLevel=INFO",
)


class SessionProcess(PipedProcess):
    """A process on the host.

    Its exit code is unknown (None) when the client's is 255: a signal, or a lost connection.
    """

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return its exit code; None if still running after `timeout_s` or unknown."""
        code = super().wait(timeout_s)
        return None if code == _CLIENT_FAILED else code


class CommandTransport(OpenProcesses):
    """One master connection of the system's SSH client, and the directory of its socket.

    An error in the user's ssh configuration is reported by that client, not looked for before.
    """

    def __init__(
        self,
        name: str,
        client: Argv,
        destination: Argv,
        directory: Path,
    ) -> None:
        super().__init__()
        self.name = name
        self._client = client
        self._destination = destination
        self._directory = directory
        self._socket = directory / "s"
        self._master: PipedProcess | None = None

    def open(self, seconds: float, by_hand: str) -> str:
        """Start the master; return "" once it is connected, else the client's error.

        Raises `PreflightError` if the log-in shell never runs its command; `by_hand` is ssh's
        command. Raises OSError.
        """
        options = _options(
            "ControlMaster=yes",
            f"ControlPath={self._socket}",
            f"ConnectTimeout={round(seconds) or 1}",
        )
        line = f"echo {_READY}; exec cat"  # valid in every shell
        argv = (*self._client, *options, *self._destination, line)
        master = self._master = PipedProcess(argv, self.name)
        late = []  # whether it had logged in when its time was over

        def give_up() -> None:
            late.append(self._socket.exists())
            master.close()

        output = b""
        with TimeLimit(seconds, give_up):
            # A shell that start-up files run instead of `cat` exits on this line.
            with suppress(ConnectionLost):
                master.write(b"exit\n" * 3)
            # A log-in shell may print a banner first.
            while _READY.encode() not in output and (data := master.read()):
                output = (output + data)[-65536:]
        if _READY.encode() in output:
            return ""
        code = master.wait(_END_TIMEOUT_S)
        # A wrapper around ssh has its own exit codes, and has printed the failure.
        is_wrapped = Path(self._client[0]).name != "ssh" and master.stderr()
        what = f"ended (exit code {code}) before it came to its command"
        if late == [True]:
            what = "did not come to its command in time"
        elif late:
            return "Connection timed out"
        elif code in (None, _CLIENT_FAILED) or code < 0 or is_wrapped:
            return master.stderr() or "it ended without an error message"
        raise preflight.shell_in_the_way(self.name, what, by_hand)

    def start(self, argv: Argv) -> SessionProcess:
        """Start `argv` on the host through the log-in shell. Raises `ConnectionLost`."""
        has_master = self._master is not None and self._master.wait(0) is None
        if not has_master or not self._socket.exists():
            raise ConnectionLost(f"{self.name}: the connection is lost.")
        # Without its master the client would connect by itself: `ProxyCommand=false` makes that
        # fail at once.
        options = _options(
            "ControlMaster=no", f"ControlPath={self._socket}", "ProxyCommand=false"
        )
        line = quoting.command_line(argv)
        try:
            process = SessionProcess(
                (*self._client, *options, *self._destination, line), self.name
            )
        except OSError as error:
            raise ConnectionLost(
                f"{self.name}: the ssh client can't be started: {error.strerror}."
            ) from error
        self._add(process)
        return process

    def close(self) -> None:
        """End the master, its sessions and its directory."""
        super().close()
        master, self._master = self._master, None
        if master is not None:
            master.close()  # its `cat` ends, and then the connection, once no session is left
            # SIGTERM first: ssh then also ends its ProxyCommand.
            for end in (signal.SIGTERM, signal.SIGKILL):
                if master.wait(_MASTER_END_S) is not None:
                    break
                with suppress(ProcessLookupError):
                    os.kill(master.pid, end)
        shutil.rmtree(self._directory, ignore_errors=True)


def connect(
    host: Host,
    access: Access,
    asker: Asker,  # noqa: ARG001 - one signature for all
) -> CommandTransport:
    """Connect and log in.

    Raises `Unreachable`, `HostKeyError`, `AuthenticationError` or `UsageError`, which name the
    host.
    """
    client = _client(access)
    destination = _destination(host)
    # Short enough for the socket's path, of which macOS allows 104 bytes.
    is_long = len(tempfile.gettempdir()) > _LONG
    directory = Path(tempfile.mkdtemp(prefix="dm-", dir="/tmp" if is_long else None))  # noqa: S108 - mkdtemp makes it private
    transport = CommandTransport(host.name, client, destination, directory)
    try:
        with connecting_program:
            said = transport.open(access.connect_timeout_s, access.by_hand(host))
    except OSError as error:
        transport.close()
        raise UsageError(
            f"--ssh-command: {client[0]} can't be run: {error.strerror}.",
            "Check the path.",
        ) from error
    except BaseException:
        transport.close()
        raise
    if said:
        transport.close()
        trouble = ssh_words.trouble(said, host, access.connect_timeout_s)
        trouble.log_in_by(access.ssh_options + host.login)
        raise trouble.for_host(host.name)
    return transport


def _client(access: Access) -> Argv:
    try:
        words = shlex.split(access.ssh_command or "ssh")
    except ValueError as error:
        raise UsageError(
            f"--ssh-command {access.ssh_command!r}: {error}.", "Close the quotation."
        ) from None
    if not words:
        raise UsageError("--ssh-command is empty.", "Write --ssh-command ssh.")
    if shutil.which(os.path.expanduser(words[0])) is None:
        raise UsageError(
            f"--ssh-command: there is no program {words[0]!r}.",
            "Install it, or leave --ssh-command out.",
        )
    client = [os.path.expanduser(words[0]), *words[1:]]
    if access.ssh_config is not None:
        client += ["-F", os.path.expanduser(access.ssh_config)]
    return (*client, "-T", *_options(*_OPTIONS))


def _options(*options: str) -> Argv:
    words = []
    for option in options:
        words += ["-o", option]
    return tuple(words)


def _destination(host: Host) -> Argv:
    user = () if host.user is None else ("-l", host.user)
    port = () if host.port is None else ("-p", str(host.port))
    return (*user, *port, "--", host.name)
