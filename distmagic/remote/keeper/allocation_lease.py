"""How long an allocation is held: as long as a notebook renews the lease, a job runs, and it is used. Pure."""

from typing import Any

LOOK_S = 5.0  # between two looks if a job still runs, when nobody renews the lease


class AllocationLease:
    """When the lead ends by itself. Pure; all times are of one clock, in seconds."""

    def __init__(self, now: float, settings: "dict[str, Any]") -> None:
        self._lease_s, self._idle_s = settings["lease_s"], settings["idle_s"]
        self._until = now + settings["first_lease_s"]
        self._used_at = now

    def renew(self, now: float) -> None:
        """The notebook is there."""
        self._until = now + self._lease_s

    def give_up(self, now: float) -> None:
        """The notebook is about to be gone."""
        self._until = now

    def use(self, now: float) -> None:
        """A connection was made."""
        self._used_at = now

    def is_due(self, now: float) -> bool:
        """Whether it is worth a look if a job runs."""
        return bool(now > self._until or now > self._used_at + self._idle_s)

    def is_over(self, now: float, *, has_job: bool) -> bool:
        """Whether the allocation ends now."""
        if has_job:
            self._used_at = now
            self._until = max(self._until, now + LOOK_S)
            return False
        return self.is_due(now)
