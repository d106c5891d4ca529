"""The side of node 0: accepts the connections of the other nodes, waits for these nodes at each
cell, starts processes on them, and sends the outcome.

Each peer authenticates. Then the first message of its connection states the purpose:

    {"node": 1, "for": "up", "dial": 1, "python": PATH}
        the node sends: {"cell": 3, "digest": SHA256}, {"bye": true}
    {"node": 1, "for": "down", "dial": 1}
        node 0 sends: {"start": 7, "argv": [...]}, {"outcome": {...}, "cell": 3}, {"bye": true}
    {"node": 1, "for": "stdin", "process": 7}
    {"node": 1, "for": "stdout", "process": 7}
        the pipes of a process: see transports/dialled

A node whose connections break counts as gone, and so does one that sends any other message, as
another version may. A restarted node connects again.
"""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from distmagic.errors import Unreachable, UsageError
from distmagic.inside.job_node import JobNode
from distmagic.inside.proof import SharedSecret
from distmagic.remote.system import threads
from distmagic.remote.wire.clipping import clipped, text_of
from distmagic.transports import Argv
from distmagic.transports.channel import Channel, ChannelMessage
from distmagic.transports.dialled import DialledTransport

ANSWER_S = 20.0  # time for a node to make the connections of a process
_TELL_S = 3.0  # after this time the user sees which node is missing
_AGAIN_S = 20.0  # time for a node whose first dial broke to dial again
TICK_S = 0.1
_HELLO_S = 10.0
_BACKLOG = 128
# Limit of one text of an error, in JSON: five of them fit into a message.
_TEXT_BYTES = 1 << 17


class Member:
    """One of the other nodes, with its connections so far.

    Guarded by the condition of `Meeting`.
    """

    def __init__(self, node_rank: int, name: str, system: str) -> None:
        self.node_rank, self.name = node_rank, name
        self.words = f"node {node_rank} of {system}"  # for messages
        self.python = ""
        self.up: Channel | None = None
        self.down: Channel | None = None
        # The number of the connection attempt that made each.
        self.dials = {"up": 0, "down": 0}
        self.cell, self.digest = 0, ""  # the last cell that it has reached
        self.outcomes: dict[int, ChannelMessage] = {}  # of cells, from that one on
        self.has_left = False
        # Connections of processes: None while waiting for them.
        self.pieces: dict[tuple[int, str], Channel | None] = {}

    @property
    def is_there(self) -> bool:
        """Whether both connections of the node exist, so that it can receive requests."""
        is_pair = self.dials["up"] == self.dials["down"]
        return self.up is not None and self.down is not None and is_pair


class Meeting:
    """Node 0 and the others, from its first cell until `close`.

    `members` are the others in order. `changed` guards them.
    """

    def __init__(self, place: JobNode, proof: SharedSecret) -> None:
        self._place = place
        self._numbers = itertools.count(1)  # of processes
        self.members = tuple(
            Member(number, name, place.system)
            for number, name in enumerate(place.names)
        )[1:]
        self.changed = threading.Condition()
        self.ended_cell = 0  # the last that has ended
        self._is_over = threading.Event()
        self._proof = proof
        self._listener = _listen(place)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        try:
            self._door = proof.door(self._listener)
        except UsageError:
            self._listener.close()
            raise
        self._thread = threads.begin("meeting", self._run)

    def _run(self) -> None:
        while not self._is_over.is_set():
            found = self._door.look(TICK_S)
            if found is not None:
                threads.begin("member", self._greet, Channel(found))

    def _greet(self, channel: Channel) -> None:
        """Read the purpose of a connection; if the node sends on it, read all its messages."""
        try:
            hello = channel.hear(_HELLO_S) or {}
            member = self.members[int(hello["node"]) - 1]
            kind = str(hello["for"])
            number = int(hello["process" if "process" in hello else "dial"])
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            channel.close()  # of another version, or gone
            return
        if kind in ("stdin", "stdout"):
            key = (number, kind)
            with self.changed:
                is_wanted = member.pieces.get(key, channel) is None
                if is_wanted:
                    member.pieces[key] = channel
                    self.changed.notify_all()
            if not is_wanted:
                channel.close()  # it comes too late
            return
        with self.changed:
            if self._is_over.is_set() or kind not in ("up", "down"):
                channel.close()
                return
            before = member.up if kind == "up" else member.down
            member.dials[kind] = number
            if kind == "up":
                member.up, member.python = channel, str(hello.get("python"))
                member.has_left = False
            else:
                member.down = channel
            self.changed.notify_all()
        self.tell_outcome(member)
        if before is not None:
            before.close()  # it has connected again
        if kind == "up":
            self._listen_to(member, channel)

    def _listen_to(self, member: Member, up: Channel) -> None:
        said: ChannelMessage | None = None
        try:
            while (said := up.hear()) is not None and "bye" not in said:
                with self.changed:
                    member.cell = int(said["cell"])
                    member.digest = str(said["digest"])
                    self.changed.notify_all()
                self.tell_outcome(member)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # it is gone, or of another version
        up.close()
        down = None
        with self.changed:
            if member.up is up:  # otherwise it was restarted
                # Without its other connection it has not arrived, and connects again.
                member.has_left = member.is_there or said is not None
                if member.is_there:
                    down, member.down = member.down, None
                member.up = None
                self.changed.notify_all()
        if down is not None:
            _say_bye(down)
            down.close()

    def tell_outcome(self, member: Member) -> None:
        """Send a node the outcome of its cell, if that cell has ended."""
        with self.changed:
            cell, down = member.cell, member.down
            for before in [one for one in member.outcomes if one < cell]:
                del member.outcomes[before]
            outcome = member.outcomes.get(cell)
            if outcome is None and 0 < cell <= self.ended_cell:
                passed = UsageError(
                    f"Node 0 has ended cell or script {self.ended_cell} already, and this node starts from the first.",
                    "Restart the notebooks of all nodes.",
                )
                outcome = {"error": as_words(passed)}
        if down is not None and outcome is not None:
            with suppress(OSError, ValueError):
                down.tell(outcome=outcome, cell=cell)

    # ---- cells

    def gather(
        self,
        cell: int,
        digest: str,
        patience_s: float,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Wait until all nodes have reached the same cell; `tell` is called with the node that is
        waited for.

        Raises `Unreachable`, and `UsageError` if a node has another cell.
        """
        began_s = time.monotonic()
        end_s = began_s + patience_s
        for member in self.members:
            tell_s = time.monotonic() + _TELL_S
            gone_s = math.inf
            while not self._has_come(member, cell):
                now = time.monotonic()
                is_cut = member.up is None and member.dials["up"]
                gone_s = min(gone_s, now + _AGAIN_S) if is_cut else math.inf
                if now > tell_s:
                    tell_s = math.inf
                    tell(f"waits for node {member.node_rank}, {member.name}.")
                if member.has_left or now > gone_s:
                    raise Unreachable(
                        member.name,
                        f"{member.words} has ended before it came to this cell or script.",
                        "Look at the output of that node for the reason.",
                    )
                if now > end_s:
                    raise Unreachable(
                        member.name,
                        f"{member.words} has not come within {(now - began_s):.0f} s.",
                        "Look at what it printed; it must run the same command with the same DISTMAGIC_SECRET, and reach "
                        f"{self._place.lead} at port {self.port}.",
                    )
        self._proof.withdraw()
        for member in self.members:
            if member.digest != digest:
                raise UsageError(
                    f"{member.name}: {member.words} runs another cell or script than node 0.",
                    "Start the same file on all nodes, and let no cell depend on the node it runs on.",
                )

    def _has_come(self, member: Member, cell: int) -> bool:
        with self.changed:
            return self.changed.wait_for(
                lambda: member.is_there and member.cell >= cell, TICK_S
            )

    def transport(self, name: str) -> DialledTransport:
        """Return a transport to a node that has arrived. Raises `Unreachable` if it is gone."""
        (member,) = (one for one in self.members if one.name == name)
        if not member.is_there:
            raise Unreachable(
                name,
                f"{member.words} has ended, or can't be reached.",
                "Its output has more.",
            )

        def begin(argv: Argv) -> tuple[Channel, Channel]:
            # The node starts the process, and makes these connections for it.
            number = next(self._numbers)
            wanted = ((number, "stdin"), (number, "stdout"))
            down = member.down
            with self.changed:
                member.pieces.update(dict.fromkeys(wanted))
            if down is not None:
                with suppress(OSError, ValueError):
                    down.tell(start=number, argv=list(argv))
                    with self.changed:
                        self.changed.wait_for(
                            lambda: all(member.pieces[key] for key in wanted), ANSWER_S
                        )
            with self.changed:
                stdin, stdout = (member.pieces.pop(key) for key in wanted)
            if stdin is not None and stdout is not None:
                return stdin, stdout
            for channel in (stdin, stdout):
                if channel is not None:
                    channel.close()
            raise Unreachable(
                member.name,
                f"{member.words} does not answer.",
                "Its output has more.",
            )

        return DialledTransport(name, begin)

    def end_cell(self, cell: int, outcome: Callable[[int], ChannelMessage]) -> None:
        """Send every node the outcome of a cell; to a node that reaches it later, then.

        `outcome` is called with its node rank.
        """
        self.ended_cell = cell
        for member in self.members:
            with self.changed:
                member.outcomes[cell] = outcome(member.node_rank)
            self.tell_outcome(member)

    def close(self) -> None:
        """Say good-bye to all nodes, and stop listening."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._thread.join()
        self._door.close()
        self._listener.close()
        self._proof.withdraw()
        channels = []
        with self.changed:  # connections from now on are closed on arrival
            for member in self.members:
                channels += [member.down, member.up, *member.pieces.values()]
        for member in self.members:
            if member.down is not None:
                _say_bye(member.down)
        for channel in channels:
            if channel is not None:
                channel.close()


def _say_bye(down: Channel) -> None:
    with suppress(OSError, ValueError):
        down.tell(bye=True)


def _listen(place: JobNode) -> socket.socket:
    """Return a socket that listens on the first free one of the job's ports.

    Raises `UsageError`.
    """
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
    raise UsageError(
        f"{place.words}: none of its ports is free ({ports}): {error.strerror}.",
        "Other programs use these ports: start the job again.",
    )


def as_words(error: BaseException) -> ChannelMessage:
    """Return an error for sending to other nodes: five texts that fit into one message.

    It may come from any library, so `message` or `hint` may not be a text.
    """
    words = {
        "kind": type(error).__name__,
        "message": getattr(error, "message", error),
        "hint": getattr(error, "hint", ""),
        "stacks": getattr(error, "stacks", ""),
        "remote_traceback": getattr(error, "remote_traceback", ""),
    }
    return {name: clipped(text_of(value), _TEXT_BYTES) for name, value in words.items()}
