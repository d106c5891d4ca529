"""What the ranks of a run have reported, as rows. Pure."""

from __future__ import annotations

import importlib
from typing import Any

from distmagic.errors import SpecError
from distmagic.state.model import RunState


class Metrics(list[dict[str, float | int | None]]):
    """The rows of `Run.metrics`."""

    def frame(self) -> Any:
        """Return them as a frame of pandas. Raises `SpecError` where that is not installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ModuleNotFoundError:
            raise SpecError(
                "pandas is not installed here.", "%pip install pandas"
            ) from None
        return pandas.DataFrame(list(self))


def metrics_of(state: RunState) -> Metrics:
    """Return the rows of `Run.metrics`."""
    rows: dict[tuple[int, float, float | None], dict[str, float | int | None]] = {}
    for rank, table in sorted(state.series.items()):
        for name, series in table.items():
            column = f"{name}_" if name in ("rank", "at_s") else name
            for point in series:
                key = (rank, point.at_s, point.step)
                rows.setdefault(
                    key, {"rank": rank, "at_s": point.at_s, "step": point.step}
                )[column] = point.value
    return Metrics(sorted(rows.values(), key=lambda row: (row["at_s"], row["rank"])))
