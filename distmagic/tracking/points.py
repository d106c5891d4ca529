"""The points of a run that were not sent to a tracker yet. Pure."""

from __future__ import annotations

import math

from distmagic.remote.frozen import frozen
from distmagic.state.model import RunState
from distmagic.state.series import Series


@frozen
class TrackedPoint:
    """One value of a metric of a rank."""

    rank: int
    name: str
    # The rank's step, counted on across epochs; the number of the point if it has none.
    step: int
    value: float
    # When the rank reported it, in seconds since 1970 by the notebook's clock.
    unix_s: float


class Unsent:
    """Returns each point of a run once."""

    def __init__(self) -> None:
        # By rank and metric: the series at the last call.
        self._before: dict[tuple[int, str], Series] = {}

    def take(self, state: RunState) -> list[TrackedPoint]:
        """Return the points since the last call, ordered by rank and metric.

        If a series was thinned since then, only the remaining new points.
        """
        found = []
        for rank, table in sorted(state.series.items()):
            for name, series in table.items():
                before = self._before.get((rank, name), Series())
                self._before[rank, name] = series
                new = _new_points(before, series)
                first, apart = float(series.arrived - len(new)), 1.0
                if not before and new:  # the series may be thinned
                    first, apart = 0.0, series.arrived / len(new)
                for index, (at_s, along, value) in enumerate(new):
                    number = round(first + index * apart)
                    point = TrackedPoint(
                        rank=rank,
                        name=name,
                        step=round(along) if math.isfinite(along) else number,
                        value=value,
                        unix_s=state.began_unix_s + at_s,
                    )
                    found.append(point)
        return found


def _new_points(before: Series, series: Series) -> list[tuple[float, float, float]]:
    count = series.arrived - before.arrived
    new = series.latest(count)
    if before and len(series) < len(before) + count:
        # The last points of a thinned series may be older.
        return [one for one in new if one[0] > before[-1].at_s]
    return new
