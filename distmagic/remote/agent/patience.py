"""How long a job runs on without a notebook, ranks that stay without a cell, and failed ranks
without a restart. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

# Time for torchrun to restart the ranks after all ranks of another node have returned. A notebook
# that follows the job waits 15 s.
RESTART_S = 20.0


class Lease:
    """A countdown of `length_s` seconds since the last renewal.

    When it expires the job ends, unless the job is detached or has `keep`: then it runs on by
    itself.
    """

    def __init__(self, now: float, length_s: float, *, keep: bool) -> None:
        self._length_s = length_s
        self._keep = keep
        self._until = now + length_s
        self.is_detached = False

    def renew(self, now: float) -> None:
        """Restart the countdown."""
        self._until = now + self._length_s

    def detach(self) -> bool:
        """Let the job run without renewals; return False if it already does."""
        was_detached = self.is_detached
        self.is_detached = True
        return not was_detached

    def has_run_out(self, now: float) -> bool:
        """Whether the countdown is over."""
        return now > self._until

    def ends_job(self, now: float) -> bool:
        """Whether the job must end because no notebook renewed the lease."""
        return self.has_run_out(now) and not (self.is_detached or self._keep)


@dataclass
class CellWait:
    """How long ranks that stay have been without a cell.

    After `limit_s` their job ends; None: their notebook ends it. Before the first cell the time
    counts only without a notebook: the ranks may take long to start.
    """

    _since: float
    _limit_s: float | None
    _cells: int = 0

    def is_too_long(
        self, now: float, *, cells: int, is_at_cell: bool, has_notebook: bool
    ) -> bool:
        """Whether the time is over.

        `cells` is the number of the last cell so far, `is_at_cell` whether one runs.
        """
        is_early = cells == 0 and has_notebook
        if is_at_cell or is_early or cells > self._cells:
            self._since = now
        self._cells = cells
        return self._limit_s is not None and now - self._since > self._limit_s


class RestartWait:
    """Measures how long two conditions have held together: a rank of this node has failed, and
    another node's ranks have all returned.

    torchrun waits for that node to restart ranks together, but that node only waits for the end. So
    it never rejoins the others. It keeps its place in the rendezvous until its own torchrun has
    waited 300 s (torch 2.13: `exit_barrier_timeout` in elastic/agent/server/api.py).
    """

    _since: float | None = None

    def is_in_vain(
        self, now: float, failed_at: float | None, *, has_returned_node: bool
    ) -> bool:
        """Whether both have held for `RESTART_S`. Must be called in every turn.

        `failed_at` is when a rank failed that torchrun has not restarted since, None if there is
        none.
        """
        if failed_at is None or not has_returned_node:
            self._since = None
            return False
        # Between two turns ranks may be restarted and fail again.
        if self._since is None or self._since < failed_at:
            self._since = now
        return now - self._since >= RESTART_S
