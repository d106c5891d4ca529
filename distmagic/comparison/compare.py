"""`distmagic.compare(run1, run2)`, and the list of the runs of a kernel."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

from distmagic.comparison import as_html, as_text
from distmagic.comparison.arguments import trainings
from distmagic.comparison.summary import RunSummary, summary
from distmagic.errors import UsageError
from distmagic.state.model import RunState

_KEPT = 50  # runs of a kernel, the last ones


class Comparison:
    """Several runs side by side, shown as a table and, in a notebook, with their curves over each other.

    `runs` has a summary of each, in the order in which they were given. `is_apart`: only runs of the same training are compared, and only their curves lie over each other.
    """

    def __init__(self, runs: Sequence[RunSummary], *, is_apart: bool = False) -> None:
        self.runs = tuple(runs)
        self._trainings = trainings(runs) if is_apart else ()

    def __repr__(self) -> str:
        return as_text.text(self.runs, self._trainings)

    def _repr_html_(self) -> str:
        return as_html.html(self.runs, self._trainings)


def compare(*runs: object) -> Comparison:
    """Put runs side by side: a row a run, the last and the best value of each metric, their curves over each other.

    A run in the background is compared as far as it is. A run's name is its `--name`, or its call. The best value of a
    metric is the max if the metric is named like an accuracy or a score, otherwise the min. Raises `UsageError` for an
    object that is not a run.
    """
    found = []
    for run in runs:
        state = getattr(run, "state", None)
        if not isinstance(state, RunState):
            raise UsageError(
                f"{reprlib.repr(run)} is not a run.",
                "Give what -o NAME or distmagic.run has left; of a detached job what its attach() returns.",
            )
        found.append(summary(state))
    return Comparison(found)


class RunHistory:
    """The last runs of a kernel, of each what is needed to compare it: it keeps no run alive."""

    def __init__(self) -> None:
        self._runs: dict[str, RunSummary] = {}

    @property
    def runs(self) -> tuple[RunSummary, ...]:
        """Those that are over, the oldest first."""
        return tuple(self._runs.values())

    def add(self, state: RunState) -> None:
        """Note a run that is over."""
        key = f"{state.job} {state.cell}"
        self._runs.pop(key, None)
        self._runs[key] = summary(state)
        if len(self._runs) > _KEPT:
            del self._runs[next(iter(self._runs))]
