"""`distmagic.compare(run1, run2)`, and the list of a kernel's runs."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Sequence

from distmagic.comparison import as_html, as_text
from distmagic.comparison.arguments import trainings
from distmagic.comparison.summary import RunSummary, summary
from distmagic.errors import UsageError
from distmagic.state.model import RunState

_KEPT = 50  # number of remembered runs


class Comparison:
    """Several runs next to each other: a table and, in a notebook, charts with the curves of all
    runs.

    `runs` has a summary of each, in the given order. If `is_apart`, only runs of the same function
    or script are compared and share a chart.
    """

    def __init__(self, runs: Sequence[RunSummary], *, is_apart: bool = False) -> None:
        self.runs = tuple(runs)
        self._trainings = trainings(runs) if is_apart else [range(len(runs))]

    def __repr__(self) -> str:
        return as_text.text(self.runs, self._trainings)

    def _repr_html_(self) -> str:
        return as_html.html(self.runs, self._trainings)


def compare(*runs: object) -> Comparison:
    """Compare runs: one table row for each, with the last and the best value of each metric, and
    charts of all curves.

    A background run is compared by its values so far. A run's label is its `--name`, or its call.
    The best value of a metric is the max if its name is like an accuracy or a score, otherwise the
    min. Raises `UsageError` for an object that is not a run.
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
    """Summaries of a kernel's last runs, for comparisons. It keeps no run alive."""

    def __init__(self) -> None:
        self._runs: dict[str, RunSummary] = {}

    @property
    def runs(self) -> tuple[RunSummary, ...]:
        """The finished runs, oldest first."""
        return tuple(self._runs.values())

    def add(self, state: RunState) -> None:
        """Remember a finished run.

        Never raises, because its error would hide the results of the run.
        """
        key = f"{state.job} {state.cell}"
        self._runs.pop(key, None)
        try:
            self._runs[key] = summary(state)
        except Exception as error:  # noqa: BLE001 - a bug
            why = f"{type(error).__name__}: {error}"
            sys.stderr.write(
                f"The list of runs lacks this one: {why}. Its results are kept.\n"
            )
        if len(self._runs) > _KEPT:
            del self._runs[next(iter(self._runs))]
