"""The byte stream under an SSH connection: a TCP socket, or the two ends of a ProxyCommand as
one.
"""

from __future__ import annotations

import errno
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from distmagic.remote.system import threads
from distmagic.transports import troubles
from distmagic.transports.piped import Tail
from distmagic.transports.ssh.config_lines import in_users_shell
from distmagic.transports.ssh.deadline import Deadline

# A broken network is noticed after this time, even if only keep-alives are sent: the kernel (Linux)
# ends a connection whose data is not acknowledged in time.
USER_TIMEOUT_MS = 6000


class Closable(Protocol):
    """What a connection holds, and must close at its end: a socket, a stream, or a client."""

    def close(self) -> None:
        """Close the object; a blocked call of another thread returns."""


class ProxyStream:
    """The standard input and output of a ProxyCommand, as one socket.

    They are two sockets, as in OpenSSH: asyncio, which SkyPilot's proxy uses, treats a readable
    standard output as closed by its reader.
    """

    def __init__(self, stdin: socket.socket, stdout: socket.socket) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._closed = False  # paramiko reads this attribute

    def send(self, data: bytes) -> int:
        """Send some bytes; return how many."""
        return self._stdin.send(data)

    def recv(self, max_bytes: int) -> bytes:
        """Return some bytes, none at the end."""
        return self._stdout.recv(max_bytes)

    def settimeout(self, seconds: float | None) -> None:
        """Set the time limit of every send and recv."""
        self._stdin.settimeout(seconds)
        self._stdout.settimeout(seconds)

    def shutdown(self, how: int) -> None:
        """End the standard input; `how` is `socket.SHUT_WR`."""
        self._stdin.shutdown(how)

    def close(self) -> None:
        """Close both."""
        self._closed = True
        self._stdin.close()
        self._stdout.close()


# What SSH runs over; a channel of another connection, which has no type, does as well.
Stream = socket.socket | ProxyStream


class ProxyProcess:
    """A running ProxyCommand."""

    def __init__(
        self, command: str, stdin: socket.socket, stdout: socket.socket
    ) -> None:
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            in_users_shell(f"exec {command}"),
            stdin=stdin.fileno(),
            stdout=stdout.fileno(),
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._tail = Tail()
        self._reader = threads.begin("proxy", self._read_stderr)

    def _read_stderr(self) -> None:
        pipe = self._process.stderr
        assert pipe is not None
        with pipe:
            while data := os.read(pipe.fileno(), 4096):
                self._tail.append(data)
        self._process.wait()

    def last_words(self) -> str:
        """Return the last line of its stderr."""
        self._reader.join(0.5)
        return (self._tail.text().strip().splitlines() or [""])[-1]

    def close(self) -> None:
        """End the program and its children."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)


def run_proxy(command: str, where: str) -> tuple[ProxyStream, ProxyProcess]:
    """Start a ProxyCommand; return its stream, and the process, which the caller closes.

    Raises `Trouble`.
    """
    ends: list[socket.socket] = []
    try:
        ends += socket.socketpair()
        ends += socket.socketpair()
        to_stdin, stdin, from_stdout, stdout = ends
        process = ProxyProcess(command, stdin, stdout)
    except OSError as error:
        for end in ends:
            end.close()
        if error.errno == errno.EMFILE:
            raise troubles.TOO_MANY_FILES(where) from None
        why = f"its ProxyCommand can't be started: {error.strerror or error}"
        raise troubles.BROKEN(where, why) from None
    stdin.close()
    stdout.close()
    return ProxyStream(to_stdin, from_stdout), process


def dial(hostname: str, port: int, where: str, deadline: Deadline) -> socket.socket:
    """Connect to the first address of `hostname` that answers. Raises `Trouble`."""
    error: OSError = TimeoutError()
    # Resolve the name on a thread, because the resolver has no time limit.
    answers: queue.SimpleQueue[list[_Address] | OSError] = queue.SimpleQueue()
    threads.begin("dns", _look_up, hostname, port, answers.put)
    try:
        answer = answers.get(timeout=max(deadline.remaining(), 0.01))
    except queue.Empty:
        raise troubles.UNKNOWN_NAME(
            f"{where}: the name service did not answer within {deadline.seconds:g} s"
        ) from None
    if isinstance(answer, OSError):
        raise troubles.of_socket(where, answer, deadline.seconds)
    for number, (family, kind, protocol, _, address) in enumerate(answer):
        # So that an unreachable IPv6 address leaves time for IPv4.
        share = deadline.remaining() / (len(answer) - number)
        dialled = None
        try:
            dialled = socket.socket(family, kind, protocol)
            dialled.settimeout(max(share, 0.01))
            dialled.connect(address)
            dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sys.platform == "linux":
                dialled.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS
                )
        except OSError as problem:
            if dialled is not None:
                dialled.close()
            error = problem
        else:
            return dialled
    raise troubles.of_socket(where, error, deadline.seconds)


_Address = tuple[int, int, int, str, Any]


def _look_up(
    hostname: str, port: int, answer: Callable[[list[_Address] | OSError], None]
) -> None:
    try:
        answer(list(socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)))
    except UnicodeError:  # a part of the name is too long
        answer(socket.gaierror(socket.EAI_NONAME, "not a host name"))
    except OSError as error:
        answer(error)
