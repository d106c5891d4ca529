"""How long an allocation is kept: while a notebook renews the lease or a job runs, and while it is
used. Pure.
"""

from typing import Any

# Pause between two checks for a running job, when no notebook renews the lease.
LOOK_S = 5.0


class AllocationLease:
    """Decides when the lead's keeper ends the allocation.

    Pure; all times are by one clock, in seconds.
    """

    def __init__(self, now: float, settings: "dict[str, Any]") -> None:
        self._lease_s, self._idle_s = settings["lease_s"], settings["idle_s"]
        self._until = now + settings["first_lease_s"]
        self._used_at = now

    def renew(self, now: float) -> None:
        """Renew the lease."""
        self._until = now + self._lease_s

    def give_up(self, now: float) -> None:
        """Record that the notebook is about to end."""
        self._until = now

    def use(self, now: float) -> None:
        """Record a new connection."""
        self._used_at = now

    def is_due(self, now: float) -> bool:
        """Whether it is time to check for a running job."""
        return bool(now > self._until or now > self._used_at + self._idle_s)

    def is_over(self, now: float, *, has_job: bool) -> bool:
        """Whether the allocation must end now."""
        if has_job:
            self._used_at = now
            self._until = max(self._until, now + LOOK_S)
            return False
        return self.is_due(now)
