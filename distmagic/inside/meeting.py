"""The side of node 0: waits for the other nodes at each cell, starts processes on them, sends the
outcome.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from contextlib import suppress

from distmagic.errors import Unreachable, UsageError
from distmagic.inside.arrivals import TICK_S, Arrivals, Member
from distmagic.inside.job_node import JobNode
from distmagic.inside.proof import SharedSecret
from distmagic.transports import Argv
from distmagic.transports.channel import Channel, ChannelMessage
from distmagic.transports.dialled import DialledTransport

ANSWER_S = 20.0  # time for a node to make the connections of a process
_TELL_S = 3.0  # after this time the user sees which node is missing
_AGAIN_S = 20.0  # time for a node whose first dial broke to dial again


class Meeting(Arrivals):
    """Node 0 and the others, from its first cell until `close`."""

    def __init__(self, place: JobNode, proof: SharedSecret) -> None:
        super().__init__(place, proof)
        self._place = place
        self._numbers = itertools.count(1)

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
                        f"node {member.node_rank} of {self._place.system} has ended before it came to this cell or script.",
                        "Look at the output of that node for the reason.",
                    )
                if now > end_s:
                    raise Unreachable(
                        member.name,
                        f"node {member.node_rank} of {self._place.system} has not come within {(now - began_s):.0f} s.",
                        "Look at what it printed; it must run the same command with the same DISTMAGIC_SECRET, and reach "
                        f"{self._place.lead} at port {self.port}.",
                    )
        self._proof.withdraw()
        for member in self.members:
            if member.digest != digest:
                raise UsageError(
                    f"{member.name}: node {member.node_rank} of {self._place.system} runs another cell or script than node 0.",
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
                f"node {member.node_rank} of {self._place.system} has ended, or can't be reached.",
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
                f"node {member.node_rank} of {self._place.system} does not answer.",
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
