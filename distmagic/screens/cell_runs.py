"""Consecutive runs of one cell, as in a loop over learning rates: they share one output.

It has a table with a row for each finished run, and below it the view of the current or last run.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from distmagic.comparison.compare import Comparison
from distmagic.comparison.summary import RunSummary, summary
from distmagic.outcome import shown
from distmagic.screens import reloaded_pages
from distmagic.state.model import RunState

if TYPE_CHECKING:
    from distmagic.screens.board import Board


class CellRuns:
    """The content of the output of one execution of a cell.

    `display_id` names the output, `view_id` its live views. There is one view at a time, `board`,
    also after its run. `is_busy`: a run is active; another run that starts meanwhile has its own
    output.
    """

    def __init__(self, execution: tuple[int, str] | None) -> None:
        self.execution = execution
        self.cell_id = reloaded_pages.cell_id()
        self.display_id = ""
        self.view_id = secrets.token_hex(8)
        self.board: Board | None = None
        self.is_busy = True
        self._over: list[RunSummary] = []

    def is_replaced_by(self, other: CellRuns) -> bool:
        """Whether `other` is a later execution of the same cell, so that the page has cleared this
        output.
        """
        if not self.cell_id or self.cell_id != other.cell_id:
            return False
        if self.execution is None or other.execution is None:
            return False
        return self.execution < other.execution

    def close(self) -> None:
        """Close its view, so that no page shows it any more."""
        board, self.board = self.board, None
        if board is not None:
            board.close()

    def add(self, state: RunState) -> None:
        """Record a finished run."""
        self.is_busy = False
        self._over.append(summary(state))

    def table(self, *, is_over: bool) -> tuple[str, str]:
        """Return the table as HTML and as text; "" and "" while there is nothing to compare.

        `is_over`: the run of the view below has ended too. A single run needs no table.
        """
        if len(self._over) <= is_over:
            return "", ""
        found = Comparison(self._over)
        return found._repr_html_(), f"{found!r}\n\n"


_last: CellRuns | None = None


def alone() -> CellRuns:
    """Return an output of the current cell for one run, such as a run in the background."""
    return CellRuns(_execution())


def begin() -> CellRuns:
    """Return the runs of the current cell, in which one more starts."""
    global _last  # noqa: PLW0603  # a kernel executes one cell at a time
    execution = _execution()
    last = _last
    if last is None or last.is_busy or execution is None or last.execution != execution:
        _last = last = CellRuns(execution)
    last.is_busy = True
    return last


def _execution() -> tuple[int, str] | None:
    """Return a unique key of this execution of a cell, None outside of a notebook."""
    parent = getattr(shown.shell(), "get_parent", None)
    if parent is None:
        return None
    message = parent().get("header", {}).get("msg_id")
    return shown.cell_number() or 0, str(message)
