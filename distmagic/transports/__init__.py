"""The interface between the launcher and a host: a transport starts one process on the host and
holds its pipes.

A transport does not use torch, jobs or ranks, and never retries by itself.
`tests/transports/contract.py` has the tests that every implementation must pass. Read the modules
in this order:

    asking.py        asks the user for passwords and passphrases
    troubles.py      explains errors of connecting to a host
    quoting.py       quotes a command line for any log-in shell
    piped.py         a process on this machine with pipes
    local.py         transport: this machine, without SSH
    ssh/             transport: paramiko, one connection a host and a channel a process
    ssh_command.py   transport: the system's `ssh` program, where paramiko can't do a configuration
    ssh_words.py     parses error messages of that program
    channel.py       a TLS connection in one direction
    dialled.py       transport: nodes that have connected to this one, with two connections for each
                     process
    time_limits.py   timers, all on one thread
    program_text.py  a small program as a command-line argument, for hosts that have no bundle yet
"""

from __future__ import annotations

from typing import Protocol

Argv = tuple[str, ...]  # a program with its arguments, or a part of them


class Process(Protocol):
    """A process on a host. Methods block; `close` from another thread makes a blocked one return.

    `is_closed`: whether `close` was called.
    """

    is_closed: bool

    def write(self, data: bytes) -> None:
        """Send all of `data` to its stdin. Raises `ConnectionLost` if the other end is gone."""

    def read(self, max_bytes: int = 65536) -> bytes:
        """Return some bytes of its stdout as soon as there are any; b"" at end of file or after
        `close`.

        Raises the errors of `start` if the process turns out not to have started.
        """

    def stderr(self) -> str:
        """Return the process's stderr so far, at most the last 8 KiB."""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return its exit code, negative for a signal; None if still running after `timeout_s` or
        unknown.
        """

    def close_stdin(self) -> None:
        """Close the process's stdin."""

    def close(self) -> None:
        """Close the pipes. The process may run on. Safe to call twice."""


class Transport(Protocol):
    """A way to start processes on a host.

    A function `connect(...)` makes it, and returns once it is ready. `warnings` are messages for
    the user about ignored parts of the configuration.
    """

    warnings: tuple[str, ...]

    def start(self, argv: Argv) -> Process:
        """Start `argv` on the host, connected by its stdin, stdout and stderr.

        Raises a `HostError` or `ConnectionLost`.
        """

    def close(self) -> None:
        """End the connection. Safe to call twice."""
