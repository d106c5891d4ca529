"""The runs of one cell that come one after the other, as in a loop over learning rates: they share one output.

It has a table with a row for each run that is over, and below it the view of the run that goes on, or was the last.
"""

from __future__ import annotations

import secrets
import sys
from typing import TYPE_CHECKING

from distmagic.comparison import as_html, as_text
from distmagic.comparison.summary import RunSummary, summary
from distmagic.outcome.shown import cell_number
from distmagic.state.model import RunState

if TYPE_CHECKING:
    from distmagic.screens.board import Board


class CellRuns:
    """What the output of one execution of a cell has had so far.

    `display_id` names the output, `view_id` its live views: of these there is one at a time, `board`, also when its run
    is over. `is_busy`: a run goes on; another one that begins meanwhile has an output of its own.
    """

    def __init__(self, execution: object) -> None:
        self.execution = execution
        self.display_id = ""
        self.view_id = secrets.token_hex(8)
        self.board: Board | None = None
        self.is_busy = True
        self._over: list[RunSummary] = []

    def add(self, state: RunState) -> None:
        """Note a run that is over."""
        self.is_busy = False
        self._over.append(summary(state))

    def table(self, *, is_over: bool) -> tuple[str, str]:
        """Return the table as HTML and as text; "" and "" while there is nothing to compare.

        `is_over`: so is the run whose view stands below it. A single one needs no table.
        """
        if len(self._over) <= is_over:
            return "", ""
        return as_html.html(self._over), f"{as_text.text(self._over)}\n\n"


_last: CellRuns | None = None


def begin() -> CellRuns:
    """Return the runs of the cell that is executed now, of which one more begins."""
    global _last  # noqa: PLW0603  # a kernel executes one cell at a time
    execution = _execution()
    last = _last
    if last is None or last.is_busy or execution is None or last.execution != execution:
        _last = last = CellRuns(execution)
    last.is_busy = True
    return last


def _execution() -> object:
    """Return a key of this execution of a cell that no other one has, None outside of a notebook."""
    number = cell_number()
    ipython = sys.modules.get("IPython")
    parent = getattr(ipython and ipython.get_ipython(), "get_parent", None)
    if number is None or parent is None:
        return None
    return number, parent().get("header", {}).get("msg_id")
