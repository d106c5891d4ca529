"""How long a job goes on when nobody asks after it: the notebook renews its lease, a detached job needs none. Pure."""

from __future__ import annotations


class Lease:
    """`length_s` from each renewal on. `keep`: the job that loses its notebook goes on alone, as if it were detached."""

    def __init__(self, now: float, length_s: float, *, keep: bool) -> None:
        self._length_s, self._keep = length_s, keep
        self._until = now + length_s
        self.is_detached = False

    def renew(self, now: float) -> None:
        """Count from `now` on."""
        self._until = now + self._length_s

    def detach(self) -> bool:
        """Need no renewal any more; return whether that is new."""
        is_new, self.is_detached = not self.is_detached, True
        return is_new

    def has_run_out(self, now: float) -> bool:
        """Whether nobody has renewed it for its length."""
        return now > self._until

    def ends_job(self, now: float) -> bool:
        """Whether the job must end for want of renewal."""
        return self.has_run_out(now) and not (self.is_detached or self._keep)
