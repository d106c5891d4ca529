"""Makes the c10d rendezvous independent of the hosts' clocks.

In torch (2.13: elastic/rendezvous/dynamic_rendezvous.py) each node writes its clock's time into a
common state, and every other node compares it with its own clock. If two hosts' clocks differ by
some seconds, a healthy node counts as dead; if a clock is set meanwhile, its node seems to stop.
With this module, each node counts from the moment at which it saw a time change, by its own
monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any


class SteadyTime:
    """Replaces the class `datetime` in torch's module: the start time of this process plus the
    elapsed time.
    """

    _began = datetime.now(timezone.utc)
    _began_s = time.monotonic()

    @classmethod
    def now(cls, _: object = None) -> datetime:
        """Return the time in UTC."""
        return cls._began + timedelta(seconds=time.monotonic() - cls._began_s)

    @classmethod
    def utcnow(cls) -> datetime:
        """Return the time in UTC without a time zone, as torch 2.4 stores all its times."""
        return cls.now().replace(tzinfo=None)


@dataclass
class SeenTimes:
    """When this node has seen changes of the times in a common state.

    These times come from other clocks, and are not compared.
    """

    _last_call: timedelta
    _now: Callable[[], datetime]
    # Written, seen.
    _beats: dict[object, tuple[datetime, datetime]] = field(default_factory=dict)
    _deadline: datetime | None = None

    def beats(self, written: dict[object, datetime]) -> dict[object, datetime]:
        """Return for each node when this node saw its latest heartbeat, by its own clock."""
        now = self._now()
        self._beats = {
            node: self._beats[node]
            if node in self._beats and self._beats[node][0] == at
            else (at, now)
            for node, at in written.items()
        }
        return {node: seen for node, (_, seen) in self._beats.items()}

    def deadline(self, written: datetime | None) -> datetime | None:
        """Return when, by this node's clock, nodes that have met stop waiting for another; None if
        they don't wait.
        """
        if written is None:
            self._deadline = None
        elif self._deadline is None:
            self._deadline = self._now() + self._last_call
        return self._deadline


def count_by_own_clock() -> None:
    """Make torchrun's rendezvous count this way in this process.

    Other versions of torch are left unchanged.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    holder: Any = getattr(dynamic_rendezvous, "_BackendRendezvousStateHolder", None)
    remove_dead = getattr(holder, "_sanitize", None)
    if remove_dead is None or not hasattr(dynamic_rendezvous, "datetime"):
        return
    has_zones = "utcnow" not in remove_dead.__code__.co_names
    now = SteadyTime.now if has_zones else SteadyTime.utcnow

    def remove_silent(self: Any) -> None:
        if not hasattr(self, "seen_times"):
            self.seen_times = SeenTimes(self._settings.timeout.last_call, now)
        state = self._state
        written = state.last_heartbeats
        state.last_heartbeats = self.seen_times.beats(written)
        state.deadline = self.seen_times.deadline(state.deadline)
        remove_dead(self)
        state.last_heartbeats = {node: written[node] for node in state.last_heartbeats}

    holder._sanitize = remove_silent  # noqa: SLF001
    dynamic_rendezvous.datetime = SteadyTime
