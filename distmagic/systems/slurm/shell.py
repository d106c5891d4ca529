"""The log-in node: one connection to it, and commands with time limits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from distmagic.errors import ConnectionLost, Unreachable
from distmagic.remote.frozen import frozen
from distmagic.systems.slurm import srun_words
from distmagic.transports import Argv, Process, Transport
from distmagic.transports.asking import Asker
from distmagic.transports.time_limits import TimeLimit

COMMAND_S = 30.0  # Slurm's commands wait long for an unreachable controller
_LONGEST = 16 << 20  # limit of an answer
_END_S = 5.0
_LATER_S = 2.0  # added to the time limit: the command's own end must not be mistaken for its answer


@frozen
class ShellAnswer:
    """The result of a command; `code` is None if unknown."""

    code: int | None
    out: str
    err: str


class Shell:
    """A log-in node as a shared `Transport`; safe to use from threads.

    `connect` makes the connection, or renews a lost one, and may ask the user; `start` never asks.
    """

    def __init__(self, name: str, connect: Callable[[Asker], Transport]) -> None:
        self.name = name
        self.warnings: tuple[str, ...] = ()
        self._make = connect
        self._transport: Transport | None = None
        self._connecting = threading.Lock()

    def connect(self, asker: Asker) -> None:
        """Connect, unless connected. Raises the errors of a transport."""
        with self._connecting:
            if self._transport is None:
                self._transport = self._make(asker)
                self.warnings = self._transport.warnings

    def start(self, argv: Argv) -> Process:
        """Start a process on the log-in node. Raises `ConnectionLost` if the connection is lost."""
        transport = self._transport
        if transport is None:
            raise ConnectionLost(f"{self.name}: the connection is lost.")
        try:
            return transport.start(argv)
        except (ConnectionLost, Unreachable):
            with self._connecting:
                if self._transport is transport:
                    self._transport = None
            transport.close()
            raise

    def run(
        self,
        argv: Argv,
        asker: Asker,
        stdin: str = "",
        timeout_s: float = COMMAND_S,
        cure: str = "Try it by hand; scontrol ping shows if Slurm is up.",
    ) -> ShellAnswer:
        """Run a command to its end.

        A command that takes too long is killed on the log-in node, with its children. Neither SSH
        nor an end of file would end it. Raises `Unreachable` with the `cure` if it takes too long,
        and the errors of `connect` and `start`.
        """
        ending = ("timeout", "-k", "5", f"{timeout_s + _LATER_S:g}")
        command = (*ending, *srun_words.clean(argv))
        try:
            self.connect(asker)
            process = self.start(command)
        except ConnectionLost:  # noticed only now
            self.connect(asker)
            process = self.start(command)
        try:
            with TimeLimit(timeout_s, process.close) as limit:
                # It ended without reading; its output has the reason.
                with suppress(ConnectionLost):
                    process.write(stdin.encode())
                process.close_stdin()
                out = b""
                while len(out) < _LONGEST:
                    data = process.read()
                    if not data:
                        break
                    out += data
                code = None if limit.is_over else process.wait(_END_S)
        finally:
            process.close()
        if limit.is_over:
            raise Unreachable(
                self.name,
                f"{argv[0]} gave no answer within {timeout_s:g} s.",
                cure,
            )
        return ShellAnswer(
            code=code, out=out.decode(errors="replace"), err=process.stderr()
        )

    def close(self) -> None:
        """End the connection."""
        with self._connecting:
            transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
