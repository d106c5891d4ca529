"""A stop that lets ranks end by themselves: they are asked as torchrun asks them, and waited for while one may do so.

An interrupt is KeyboardInterrupt in every rank. For all else that ends a job in which nothing has failed, ranks get the
SIGTERM that they handle, or KeyboardInterrupt where none of a node handles it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from distmagic.remote.agent.rank_process import RankProcess
from distmagic.remote.system import awake, processes
from distmagic.remote.wire.vocabulary import POLITE_REASONS, StopReason

_INTERRUPTS: frozenset[StopReason] = frozenset(("interrupted", "stopped"))
_LOOK_S = 0.3  # the first one when the signal has gone through torchrun
_REACT_S = 3.0  # ranks of which none runs Python for so long end by themselves no more


def is_possible(reason: StopReason, ranks: Sequence[RankProcess]) -> bool:
    """Whether this reason lets ranks end by themselves, and any of them runs."""
    return reason in POLITE_REASONS and any(rank.is_running for rank in ranks)


class PoliteStop:
    """The wait for ranks that were asked to end. `is_ending`: one of this node is about to, at the latest look."""

    def __init__(self, run_dir: Path, now: float) -> None:
        self._run_dir = run_dir
        self._began = self._hopeful_at = now
        self._look_at = now + _LOOK_S
        self.is_ending = False

    def look(
        self, ranks: Sequence[RankProcess], now: float, *, has_ending_peer: bool
    ) -> bool:
        """Ask ranks whether they run Python; return whether there is no hope left that one of the job ends by itself.

        A rank that has run Python since it was asked may be saving for long in C afterwards. One that waits in C, for a
        rank that has ended, say, is asked again.
        """
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            # All of them: each is to be asked.
            self.is_ending = any(list(map(self._may_end, ranks)))
        if self.is_ending or has_ending_peer:
            self._hopeful_at = now
        return now - self._hopeful_at > _REACT_S

    def _may_end(self, rank: RankProcess) -> bool:
        if rank.process is None or not rank.is_running:
            return False
        if rank.is_over:  # what it does at its exit; that of a rank that had returned before may last for ever
            return rank.over_at >= self._began
        pid = rank.hello.pid
        if not processes.catches(pid, awake.SIGNAL):
            return True  # it has become another program
        if awake.has_answered(self._run_dir, pid):
            return True
        processes.send(rank.process, awake.SIGNAL)
        return False


def signal_for(reason: StopReason, ranks: Sequence[RankProcess]) -> signal.Signals:
    """Return the signal for these ranks."""
    if reason not in _INTERRUPTS:
        for rank in ranks:
            if processes.catches(rank.hello.pid, signal.SIGTERM):
                return signal.SIGTERM
    return signal.SIGINT
