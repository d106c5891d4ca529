"""Transport to nodes that have connected to this one.

Each process has two connections, which its node makes on request.

    stdin    this end sends:  "i" with bytes, "e": end of file
    stdout   the node sends:  "o" with bytes, "e": end of file; then "s" with the end of stderr,
                              "x" with the exit code
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from distmagic.errors import ConnectionLost
from distmagic.remote.system import threads
from distmagic.transports import Argv, Process
from distmagic.transports.channel import Channel
from distmagic.transports.piped import OpenProcesses, Tail

INPUT, OUTPUT, END, STDERR, EXIT = b"i", b"o", b"e", b"s", b"x"

Begin = Callable[[Argv], tuple[Channel, Channel]]


class DialledProcess:
    """A process on node `name`, used through its two connections."""

    def __init__(self, name: str, stdin: Channel, stdout: Channel) -> None:
        self._name = name
        self._stdin, self._stdout = stdin, stdout
        # Unread stdout; the node waits while it is full.
        received, self._output = socket.socketpair()
        self._reading = threading.Lock()
        self.is_closed = False
        self._code: int | None = None
        self._ended = threading.Event()
        self._tail = Tail()
        threads.begin(f"dialled-{name}", self._receive, received)

    def _receive(self, output: socket.socket) -> None:
        """Receive the node's data until its end."""
        try:
            while True:
                kind, data = self._stdout.receive()
                if kind == OUTPUT:
                    output.sendall(data)
                elif kind == END:
                    output.shutdown(socket.SHUT_WR)
                elif kind == STDERR:
                    self._tail.append(data)
                elif kind == EXIT:
                    self._code = int(data)
                    self._ended.set()
                else:
                    break
        except OSError:
            pass  # `wait` reports it: there is no exit code
        finally:
            output.close()
            self._ended.set()
            self._stdout.close()

    def write(self, data: bytes) -> None:
        """Send all of `data` to its stdin. Raises `ConnectionLost` if the other end is gone."""
        try:
            self._stdin.send(INPUT, data)
        except (OSError, ValueError):  # ValueError: closed
            raise ConnectionLost(
                f"{self._name}: the process or the connection no longer takes input."
            ) from None

    def read(self, max_bytes: int = 65536) -> bytes:
        """Return bytes as soon as there are any; b"" at end of file, after `close` or when the
        connection is lost.
        """
        with self._reading:
            return b"" if self.is_closed else self._output.recv(max_bytes)

    def stderr(self) -> str:
        """Return the end of its stderr after it has ended; "" before that."""
        return self._tail.text()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return its exit code, negative for a signal; None if still running or if the connection
        ended first.
        """
        self._ended.wait(timeout_s)
        return self._code

    def close_stdin(self) -> None:
        """Close the process's stdin, after the bytes that are being written."""
        with suppress(OSError, ValueError):
            self._stdin.send(END)

    def close(self) -> None:
        """Close the connections; a blocked read or write returns. The process may run on."""
        self.is_closed = True
        with suppress(OSError):  # closed before
            self._output.shutdown(socket.SHUT_RDWR)
        with self._reading:
            self._output.close()
        self._stdin.close()
        self._stdout.close()


class DialledTransport(OpenProcesses):
    """Starts processes on a node that has connected to this one; `begin` requests the connections
    of a process.
    """

    def __init__(self, name: str, begin: Begin) -> None:
        super().__init__()
        self._name, self._begin = name, begin

    def start(self, argv: Argv) -> DialledProcess:
        """Start `argv` on the node. Raises `Unreachable` if it doesn't answer."""
        process = DialledProcess(self._name, *self._begin(argv))
        self._add(process)
        return process


def serve(process: Process, stdin: Channel, stdout: Channel) -> None:
    """On the node: forward a process's pipes over its two connections, and return when it has ended
    and all is sent.
    """
    feeding = threads.begin("feed", _feed, process, stdin)
    try:
        while data := process.read():
            stdout.send(OUTPUT, data)
        stdout.send(END)
        code = process.wait()
        stdout.send(STDERR, process.stderr().encode())
        stdout.send(EXIT, str(0 if code is None else code).encode())
    except OSError:
        pass  # the other end is gone: the process gets the end of its stdin, and a closed stdout
    finally:
        stdin.close()
        process.close()
        stdout.close()
        feeding.join()


def _feed(process: Process, stdin: Channel) -> None:
    """Forward data to the process's stdin, up to the end of file."""
    with suppress(OSError, ConnectionLost):
        while True:
            kind, data = stdin.receive()
            if kind != INPUT:
                break
            process.write(data)
    process.close_stdin()
    stdin.close()
