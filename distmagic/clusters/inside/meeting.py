"""Node 0's half: listens for the other nodes of its job, and starts processes on them.

Every connection has been proved (proof.py) before anything of it is read. Its first line, from the node that dials, says what it is for:

    {"node": 1, "for": "up", "dial": 1, "python": PATH}
                                                the node speaks: {"cell": 3, "digest": SHA256}, {"bye": true}
    {"node": 1, "for": "down", "dial": 1}       node 0 speaks:   {"start": 7, "argv": [...]}, {"outcome": {...}}, {"bye": true}
    {"node": 1, "for": "stdin", "process": 7}   see transports/dialled
    {"node": 1, "for": "stdout", "process": 7}

A node whose connections break dials again: both lasting ones, with the next number.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from distmagic.clusters.inside.place import Place
from distmagic.clusters.inside.proof import Proof
from distmagic.errors import SpecError, Unreachable
from distmagic.transports.channel import Channel
from distmagic.transports.dialled import DialledTransport

ANSWER_S = 20.0  # for a node to make the connections of a process
_HELLO_S = 10.0
_TICK_S = 0.1
_TELL_S = 3.0  # before somebody is told that a node is waited for
_REFUSED_S = 30.0  # with the wrong secret in view, a node is waited for no longer
_AGAIN_S = 30.0  # for a node whose connections broke to dial again
_BACKLOG = 128


class Member:
    """One of the other nodes, as far as it has dialled. Guarded by the meeting's condition."""

    def __init__(self, node_rank: int, name: str) -> None:
        self.node_rank, self.name = node_rank, name
        self.python = ""
        self.up: Channel | None = None
        self.down: Channel | None = None
        self.down_dial = 0  # the number of the dial that made it
        self.cell, self.digest = 0, ""  # the last cell that it has come to
        self.missed: dict[int, dict[str, Any]] = {}  # outcomes of cells, by number
        self.has_left = False
        self.lost_at_s: float | None = None
        # Connections of processes: None while they are waited for.
        self.pieces: dict[tuple[int, str], Channel | None] = {}

    @property
    def is_there(self) -> bool:
        """Whether it can be asked for something."""
        return self.up is not None and self.down is not None


class Meeting:
    """Node 0, listening from `open` to `close`."""

    def __init__(self, place: Place, proof: Proof) -> None:
        self.members = tuple(
            Member(number, name) for number, name in enumerate(place.names)
        )[1:]
        self._place = place
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._is_over = threading.Event()
        self._listener = _listen(place)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._door = proof.door(self._listener)
        self._thread = threading.Thread(
            target=self._run, name="distmagic-meeting", daemon=True
        )
        self._thread.start()

    # ---- who dials

    def _run(self) -> None:
        while not self._is_over.is_set():
            found = self._door.look(_TICK_S)
            if found is not None:
                threading.Thread(
                    target=self._greet,
                    args=(found,),
                    name="distmagic-member",
                    daemon=True,
                ).start()

    def _greet(self, tls: ssl.SSLSocket) -> None:
        """Read what a connection is for; of one that a node speaks on, all that it says."""
        channel = Channel(tls)
        try:
            hello = channel.hear(_HELLO_S) or {}
            member = self._member(hello)
            kind = str(hello.get("for"))
            if member is None or kind not in ("up", "down", "stdin", "stdout"):
                channel.close()
            elif kind in ("stdin", "stdout"):
                self._take(member, (int(hello["process"]), kind), channel)
            else:
                self._meet(member, kind, channel, hello)
        except (OSError, ValueError, KeyError, TypeError):
            channel.close()

    def _member(self, hello: dict[str, Any]) -> Member | None:
        for member in self.members:
            if member.node_rank == hello.get("node"):
                return member
        return None

    def _take(self, member: Member, key: tuple[int, str], channel: Channel) -> None:
        with self._changed:
            is_wanted = member.pieces.get(key, channel) is None
            if is_wanted:
                member.pieces[key] = channel
                self._changed.notify_all()
        if not is_wanted:
            channel.close()  # it comes too late

    def _meet(
        self, member: Member, kind: str, channel: Channel, hello: dict[str, Any]
    ) -> None:
        dial = int(hello["dial"])
        with self._changed:
            if self._is_over.is_set():
                channel.close()
                return
            before = member.up if kind == "up" else member.down
            if kind == "down":
                member.down, member.down_dial = channel, dial
            else:
                member.up, member.python = channel, str(hello["python"])
            member.has_left, member.lost_at_s = False, None
            self._changed.notify_all()
        self._tell_missed(member)
        if before is not None:
            before.close()  # it has dialled again
        if kind == "up":
            self._listen_to(member, channel, dial)

    def _listen_to(self, member: Member, up: Channel, dial: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (said := up.hear()) is not None:
                with self._changed:
                    if "cell" in said:
                        member.cell, member.digest = (
                            int(said["cell"]),
                            str(said["digest"]),
                        )
                    member.has_left = bool(said.get("bye"))
                    self._changed.notify_all()
                self._tell_missed(member)
        up.close()
        down = None
        with self._changed:
            if member.up is up:
                member.up = None
                member.lost_at_s = time.monotonic()
            if member.down_dial == dial:
                down, member.down = member.down, None
            self._changed.notify_all()
        if down is not None:
            down.close()

    # ---- what node 0 does

    def gather(
        self,
        cell: int,
        digest: str,
        patience_s: float,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Return when all nodes have come to the same cell; `tell` is called with the node that is waited for.

        Raises `Unreachable`, and `SpecError` where a node has another cell.
        """
        began_s = time.monotonic()
        end_s = began_s + patience_s
        for member in self.members:
            tell_s = time.monotonic() + _TELL_S
            while not self._has_come(member, cell):
                now = time.monotonic()
                if now > tell_s:
                    tell_s = math.inf
                    tell(f"waits for node {member.node_rank}, {member.name}.")
                if member.has_left:
                    raise Unreachable(
                        member.name,
                        f"node {member.node_rank} of {self._place.system} has ended before it came to this cell or script.",
                        "What it printed says why.",
                    )
                is_lost = (
                    member.lost_at_s is not None and now > member.lost_at_s + _AGAIN_S
                )
                is_refused = self._door.refused > 0 and now > began_s + _REFUSED_S
                if now > end_s or is_lost or is_refused:
                    raise self._absent(member, now - began_s)
        for member in self.members:
            if member.digest != digest:
                raise SpecError(
                    f"{member.name}: node {member.node_rank} of {self._place.system} runs another cell or script than node 0.",
                    "Start the same file on all nodes, and let no cell depend on the node it runs on.",
                )

    def _has_come(self, member: Member, cell: int) -> bool:
        with self._changed:
            if not (member.is_there and member.cell >= cell):
                self._changed.wait(_TICK_S)
            return member.is_there and member.cell >= cell

    def _absent(self, member: Member, waited_s: float) -> Unreachable:
        what = f"node {member.node_rank} of {self._place.system} has not come within {waited_s:.0f} s."
        hint = (
            "Look at what it printed; it must run the same command, and reach "
            f"{self._place.lead} at port {self.port}."
        )
        if self._door.refused:
            hint = "Somebody dialled without the right secret: set DISTMAGIC_SECRET to one value on all nodes."
        return Unreachable(member.name, what, hint)

    def transport(self, name: str) -> DialledTransport:
        """Return the way to a node that has come. Raises `Unreachable` where it has gone, and stays away."""
        (member,) = (one for one in self.members if one.name == name)
        with self._changed:
            self._changed.wait_for(lambda: member.is_there or member.has_left, _AGAIN_S)
            if not member.is_there:
                raise Unreachable(
                    name,
                    f"node {member.node_rank} of {self._place.system} has ended, or can't be reached.",
                    "What it printed says more.",
                )

        def begin(argv: tuple[str, ...]) -> tuple[Channel, Channel]:
            return self._begin(member, argv)

        return DialledTransport(name, begin)

    def _begin(self, member: Member, argv: tuple[str, ...]) -> tuple[Channel, Channel]:
        """Have a node start a process, and return the connections that it makes for it."""
        number = next(self._numbers)
        wanted = ((number, "stdin"), (number, "stdout"))
        down = member.down
        with self._changed:
            member.pieces.update(dict.fromkeys(wanted))
        is_asked = False
        if down is not None:
            with contextlib.suppress(OSError, ValueError):
                down.tell(start=number, argv=list(argv))
                is_asked = True
        if is_asked:
            with self._changed:
                self._changed.wait_for(
                    lambda: all(member.pieces[key] for key in wanted), ANSWER_S
                )
        with self._changed:
            stdin, stdout = (member.pieces.pop(key) for key in wanted)
        if stdin is not None and stdout is not None:
            return stdin, stdout
        for channel in (stdin, stdout):
            if channel is not None:
                channel.close()
        raise self._silent(member)

    def _silent(self, member: Member) -> Unreachable:
        return Unreachable(
            member.name,
            f"node {member.node_rank} of {self._place.system} does not answer.",
            "What it printed says more.",
        )

    def end_cell(self, cell: int, outcome: Callable[[int], dict[str, Any]]) -> None:
        """Tell every node how a cell has ended; one that comes to it later, then. `outcome` is called with its node rank."""
        for member in self.members:
            with self._changed:
                member.missed[cell] = outcome(member.node_rank)
            self._tell_missed(member)

    def _tell_missed(self, member: Member) -> None:
        """Tell a node how the cell has ended that it has come to, if that is so."""
        with self._changed:
            down = member.down
            if down is None or member.cell not in member.missed:
                return
            outcome = member.missed[member.cell]
            for cell in [one for one in member.missed if one <= member.cell]:
                del member.missed[cell]
        with contextlib.suppress(OSError, ValueError):
            down.tell(outcome=outcome)

    def close(self) -> None:
        """Say good-bye, and listen no longer."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._thread.join()
        self._door.close()
        self._listener.close()
        channels: list[Channel | None] = []
        with self._changed:  # what comes from now on is closed where it comes
            for member in self.members:
                channels += [member.down, member.up, *member.pieces.values()]
        for member in self.members:
            if member.down is not None:
                with contextlib.suppress(OSError, ValueError):
                    member.down.tell(bye=True)
        for channel in channels:
            if channel is not None:
                channel.close()


def _listen(place: Place) -> socket.socket:
    """Return a socket that listens at the first free one of the job's ports. Raises `SpecError`."""
    is_dual = socket.has_dualstack_ipv6()
    error: OSError = OSError()
    for port in place.ports:
        try:
            return socket.create_server(
                ("", port),
                family=socket.AF_INET6 if is_dual else socket.AF_INET,
                backlog=_BACKLOG,
                dualstack_ipv6=is_dual,
            )
        except OSError as problem:
            error = problem
    ports = ", ".join(map(str, place.ports))
    raise SpecError(
        f"{place.words}: none of its ports is free ({ports}): {error.strerror}.",
        "Something else listens there: start the job again.",
    )


def as_words(error: BaseException) -> dict[str, Any]:
    """Return an error as it is told to other nodes."""
    return {
        "kind": type(error).__name__,
        "message": getattr(error, "message", str(error)),
        "hint": getattr(error, "hint", ""),
        "stacks": getattr(error, "stacks", ""),
        "remote_traceback": getattr(error, "remote_traceback", ""),
    }
