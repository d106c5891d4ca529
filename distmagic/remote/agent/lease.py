"""How long a job runs on without a request from a notebook, and ranks that stay without a cell. Pure."""

from __future__ import annotations


class Lease:
    """A countdown of `length_s` seconds since the last renewal.

    When it expires the job ends, unless the job is detached or has `keep`: then it runs on by itself.
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


class CellWait:
    """How long ranks that stay have been without a cell. After `limit_s` their job ends; None: their notebook ends it.

    Before the first cell the time counts only without a notebook: the ranks may take long to start.
    """

    def __init__(self, now: float, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._since = now
        self._cells = 0

    def is_too_long(
        self, now: float, *, cells: int, is_at_cell: bool, has_notebook: bool
    ) -> bool:
        """Whether the time is over. `cells` is the number of the last cell so far, `is_at_cell` whether one runs."""
        is_early = cells == 0 and has_notebook
        if is_at_cell or is_early or cells > self._cells:
            self._since = now
        self._cells = cells
        return self._limit_s is not None and now - self._since > self._limit_s
