"""Runs on each node except node 0: connects to node 0, and starts the processes that node 0
requests.

meeting.py lists the messages between the two.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import socket
import ssl
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from distmagic.errors import Unreachable
from distmagic.inside.job_node import JobNode
from distmagic.inside.proof import SECRET, SharedSecret, WrongSecret
from distmagic.remote.system import threads
from distmagic.transports import Argv, dialled
from distmagic.transports.channel import Channel, ChannelMessage
from distmagic.transports.local import LocalTransport

DIAL_S = 2.0  # time limit of one attempt
_PAUSE_S = 0.2
_WRONG_S = 10.0  # time with answers for another secret only
# Variables of this process's starter, and the secret, are not for ranks.
_NOT_FOR_RANKS = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY", SECRET)


@dataclass(eq=False)
class Following:
    """One node that follows node 0, from the first cell to the end of this process."""

    _place: JobNode
    _proof: SharedSecret
    _address: str
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _up: Channel | None = None
    _down: Channel | None = None
    _outcome: ChannelMessage | None = None
    _why_over: str = ""  # how node 0 was lost
    _cell: int = 0
    _peer: str = ""

    # ---- one cell

    def come(self, cell: int, digest: str, patience_s: float) -> None:
        """Report to node 0 that this node has reached a cell, connecting first if needed.

        Raises `Unreachable`.
        """
        with self._changed:
            self._outcome, self._cell = None, cell
        if self._up is None:
            self._dial(time.monotonic() + patience_s)
            threads.begin("following", self._serve)
        assert self._up is not None
        # If the connection is broken, `outcome` reports it.
        with suppress(OSError, ValueError):
            self._up.tell(cell=cell, digest=digest)

    def outcome(self) -> ChannelMessage:
        """Wait until node 0 sends the outcome of the cell. Raises `Unreachable` if it is gone."""
        with self._changed:
            while self._outcome is None and not self._why_over:
                self._changed.wait(1.0)  # an interrupt takes effect between two waits
            if self._outcome is None:
                raise Unreachable(
                    self._place.lead,
                    f"node 0 of {self._place.system} {self._why_over}",
                    "Its output has more.",
                )
            return self._outcome

    def close(self) -> None:
        """Report to node 0 that this node leaves."""
        if self._up is not None and self._down is not None:
            with suppress(OSError, ValueError):
                self._up.tell(bye=True)
            self._up.close()
            self._down.close()

    # ---- connecting

    def _dial(self, end_s: float) -> None:
        """Open both lasting connections, once node 0 listens. Raises `Unreachable`."""
        began_s = time.monotonic()
        why, wrong_since_s = "", math.inf
        while time.monotonic() < end_s:
            try:
                dial = secrets.randbits(32)
                up = self._open("up", dial=dial, python=sys.executable)
                try:
                    self._down = self._open("down", dial=dial)
                except OSError:
                    up.close()
                    raise
                self._up = up
            except WrongSecret as error:
                why = str(error)
                wrong_since_s = min(wrong_since_s, time.monotonic())
            except OSError as error:
                why = error.strerror or str(error)
                wrong_since_s = math.inf
            else:
                return
            if time.monotonic() > wrong_since_s + _WRONG_S:
                raise Unreachable(
                    self._place.lead,
                    f"node 0 of {self._place.system} has another DISTMAGIC_SECRET than this node, {self._place.node_rank}.",
                    "Set it to one value on all nodes.",
                )
            time.sleep(_PAUSE_S)
        ports = f"{self._place.ports[0]} and {len(self._place.ports) - 1} others"
        raise Unreachable(
            self._place.lead,
            f"node 0 of {self._place.system} has not answered node {self._place.node_rank} "
            f"within {time.monotonic() - began_s:.0f} s: {why}.",
            f"It must run the same command. Firewalls must let the other nodes connect to its TCP ports {ports}.",
        )

    def _open(self, what: str, **more: Any) -> Channel:
        """Connect to the ports of node 0, one after the other, and return the connection that
        proves the secret.

        Raises OSError if no port does: `WrongSecret` if a process with another secret answered,
        else the last error. An error other than a refused connection is preferred.
        """
        problem: OSError = ConnectionRefusedError("Connection refused")
        # Once for all ports: a name service may be slow. It is asked again at the next attempt.
        found = socket.getaddrinfo(self._address, None, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(one[4][0]) for one in found)
        for port, address in itertools.product(self._place.ports, addresses):
            try:
                channel = Channel(self._connect(address, port))
            except OSError as error:
                says_more = not isinstance(error, ConnectionRefusedError)
                if says_more and not isinstance(problem, WrongSecret):
                    problem = error
                continue
            try:
                channel.tell(node=self._place.node_rank, **{"for": what}, **more)
            except OSError:
                channel.close()
                raise
            return channel
        raise problem

    def _connect(self, address: str, port: int) -> ssl.SSLSocket:
        plain = socket.create_connection((address, port), DIAL_S)
        try:
            self._peer = str(plain.getpeername()[0])
            return self._proof.wrap(plain)
        except BaseException:
            plain.close()
            raise

    # ---- serving

    def _serve(self) -> None:
        """Carry out requests of node 0, until it says good-bye or the connection breaks."""
        down = self._down
        assert down is not None
        why = "is gone: its connections broke."
        with suppress(OSError, ValueError, KeyError):
            while (said := down.hear()) is not None:
                if "start" in said:
                    threads.begin(
                        "process",
                        self._start,
                        int(said["start"]),
                        tuple(map(str, said["argv"])),
                    )
                elif "outcome" in said:
                    with self._changed:
                        # Otherwise of an earlier one.
                        if said["cell"] == self._cell:
                            self._outcome = said["outcome"]
                            self._changed.notify_all()
                elif said.get("bye"):
                    why = "has ended before it reported how this cell or script ended."
                    break
        self.close()
        with self._changed:
            self._why_over = why
            self._changed.notify_all()

    def _start(self, number: int, argv: Argv) -> None:
        """Start a process, and forward its pipes until it has ended."""
        with suppress(OSError):
            stdin = self._open("stdin", process=number)
            try:
                stdout = self._open("stdout", process=number)
            except OSError:
                stdin.close()
                raise
            dialled.serve(
                LocalTransport().start(for_ranks(argv, self._peer)), stdin, stdout
            )


def for_ranks(argv: Argv, peer: str) -> Argv:
    """Return the command that runs `argv` with the variables for ranks, which connect towards
    `peer`.
    """
    without = []
    for name in _NOT_FOR_RANKS:
        without += ["-u", name]
    program, *words = argv
    return (
        "env", *without, f"DISTMAGIC_CLIENT={peer}", os.path.expanduser(program), *words,
    )  # fmt: skip
