"""How long a job runs on without a request from a notebook. Pure."""

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
