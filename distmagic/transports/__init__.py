"""The seam between the launcher and a host: start one process there and hold its pipes. Nothing else.

A transport knows nothing of torch, jobs or ranks, and never tries again by itself. `tests/transports/contract.py` is
the contract, run over every implementation. Read the modules in this order:

    asking.py        asks the user: passwords, passphrases
    troubles.py      what goes wrong on the way to a host, in words
    quoting.py       one command line for any log-in shell
    piped.py         a process on this machine behind pipes
    local.py         transport: this machine, no SSH
    ssh/             transport: paramiko, one connection a host and a channel a process
    ssh_command.py   transport: the system's `ssh` program, for configurations that paramiko can't do
    ssh_words.py     what that program says when it fails, understood
    channel.py       a TLS connection in one direction
    dialled.py       transport: nodes that have dialled this one, two such connections a process
    time_limits.py   what happens when a time is up, from one thread for all of them
    program_text.py  a small program as an argument, for where nothing of ours is yet
"""

from __future__ import annotations

from typing import Protocol


class Process(Protocol):
    """A process on a host. Methods block; `close` from another thread ends a blocked one."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""

    def write(self, data: bytes) -> None:
        """Send all of `data` to its stdin. Raises `ConnectionLost` if the other end is gone."""

    def read(self, max_bytes: int = 65536) -> bytes:
        """Return some bytes of its stdout, as soon as there are any; b"" at end of file or after `close`.

        Where only now it is known that the process could not be started, raises what `start` raises.
        """

    def stderr(self) -> str:
        """Return the process's stderr so far, at most the last 8 KiB."""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return its exit code, negative for a signal; None if still running after `timeout_s` or unknown."""

    def close_stdin(self) -> None:
        """Close the process's stdin."""

    def close(self) -> None:
        """Let go of the pipes. Does not promise that the process ends. Safe to call twice."""


class Transport(Protocol):
    """A way to a host. Made by a function `connect(...)` that returns once the host can start processes.

    `warnings` are for the user: what of the configuration was left out.
    """

    warnings: tuple[str, ...]

    def start(self, argv: tuple[str, ...]) -> Process:
        """Start `argv` on the host, its stdin, stdout and stderr ours. Raises a `HostError` or `ConnectionLost`."""

    def close(self) -> None:
        """End the connection. Safe to call twice."""
