"""A stop that lets ranks end by themselves: asks them as torchrun would, and waits while any of
them may still do so.

An interrupt raises KeyboardInterrupt in every rank. For any other stop without a failure, ranks get
SIGTERM if they handle it, or KeyboardInterrupt if no rank of the node handles it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from distmagic.remote.agent.rank_process import RankProcess
from distmagic.remote.system import awake, processes
from distmagic.remote.wire.vocabulary import POLITE_REASONS, StopReason

_INTERRUPTS: frozenset[StopReason] = frozenset(("interrupted", "stopped"))
_LOOK_S = 0.3  # time of the first check: the signal has passed through torchrun by then
_REACT_S = 3.0  # if no rank runs Python for so long, none will end by itself


def is_possible(reason: StopReason, ranks: Sequence[RankProcess]) -> bool:
    """Whether this reason lets ranks end by themselves, and any of them runs."""
    return reason in POLITE_REASONS and any(rank.is_running for rank in ranks)


class PoliteStop:
    """The wait for ranks that were asked to end.

    `is_ending`: by the last check, a rank of this node is about to end.
    """

    def __init__(self, run_dir: Path, now: float) -> None:
        self._run_dir = run_dir
        self._began = self._hopeful_at = now
        self._look_at = now + _LOOK_S
        self.is_ending = False

    def look(
        self, ranks: Sequence[RankProcess], now: float, *, has_ending_peer: bool
    ) -> bool:
        """Check whether ranks run Python; return whether no rank of the job can be expected to end
        by itself.

        A rank that has run Python since the request may afterwards save for long in C code. A rank
        that is blocked in C code, for example because it waits for a rank that has ended, is asked
        again.
        """
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            # All of them, because each must be asked.
            self.is_ending = any(list(map(self._may_end, ranks)))
        if self.is_ending or has_ending_peer:
            self._hopeful_at = now
        return now - self._hopeful_at > _REACT_S

    def _may_end(self, rank: RankProcess) -> bool:
        if rank.process is None or not rank.is_running:
            return False
        # Its process runs the exit code of Python and of libraries. For a rank that had returned
        # before, that may take forever.
        if rank.is_over:
            return rank.over_at >= self._began
        pid = rank.hello.pid
        if not processes.catches(pid, awake.SIGNAL):
            return True  # it has become another program
        if awake.has_answered(self._run_dir, pid):
            return True
        processes.send(rank.process, awake.SIGNAL)
        return False


def signal_for(reason: StopReason, ranks: Sequence[RankProcess]) -> signal.Signals:
    """Return the signal that asks these ranks to end."""
    if reason not in _INTERRUPTS:
        for rank in ranks:
            if processes.catches(rank.hello.pid, signal.SIGTERM):
                return signal.SIGTERM
    return signal.SIGINT
