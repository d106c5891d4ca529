"""How nodes meet by c10d, without comparing the clocks of their hosts.

torch (2.13: elastic/rendezvous/dynamic_rendezvous.py) has each node write the time of its own clock into a common state,
and every other node compare it with the time of its clock. Where two hosts' clocks are some seconds apart, a healthy
node counts as dead; where one is set meanwhile, nobody hears of its node any more. Here each node counts from when it
has itself seen a time change, by a clock that nobody can set.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any


class SteadyTime:
    """Stands for the class `datetime` in torch's module: the time when this process began, and what has passed since."""

    _began = datetime.now(timezone.utc)
    _began_s = time.monotonic()

    @classmethod
    def now(cls, _: object = None) -> datetime:
        """Return the time in UTC."""
        return cls._began + timedelta(seconds=time.monotonic() - cls._began_s)

    @classmethod
    def utcnow(cls) -> datetime:
        """Return the time in UTC without its zone, as torch 2.4 has all of its times."""
        return cls.now().replace(tzinfo=None)


class SeenTimes:
    """When this node has seen the times of a common state change. They are of other clocks, and say nothing else."""

    def __init__(self, last_call: timedelta, now: Callable[[], datetime]) -> None:
        self._last_call = last_call
        self._now = now
        self._beats: dict[object, tuple[datetime, datetime]] = {}  # written, seen
        self._deadline: datetime | None = None

    def beats(self, written: dict[object, datetime]) -> dict[object, datetime]:
        """Return for each node when its latest heartbeat was seen here, by the clock here."""
        now = self._now()
        self._beats = {
            node: self._beats[node]
            if node in self._beats and self._beats[node][0] == at
            else (at, now)
            for node, at in written.items()
        }
        return {node: seen for node, (_, seen) in self._beats.items()}

    def deadline(self, written: datetime | None) -> datetime | None:
        """Return when, by the clock here, nodes that have met wait no longer for another one; None where they don't wait."""
        if written is None:
            self._deadline = None
        elif self._deadline is None:
            self._deadline = self._now() + self._last_call
        return self._deadline


def count_by_own_clock() -> None:
    """Have torchrun's rendezvous count so in this process. Another version of torch is left as it is."""
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
