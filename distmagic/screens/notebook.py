"""One output of a notebook's cell: widgets while the run goes on, text and HTML in the end."""

from __future__ import annotations

from collections.abc import Callable

from distmagic import render
from distmagic.screens.board import Board
from distmagic.state.model import RunState

# The output as text and HTML is what a saved notebook holds. Beside widgets it is renewed rarely: each time a scrolled
# pane jumps to its end. Without widgets it is the live view itself.
_SAVED_EVERY_S = 120.0
_PLAIN_EVERY_S = 0.5
_BYTES_PER_S = 100_000
_WIDGET_TYPE = "application/vnd.jupyter.widget-view+json"
WHILE_RUNNING = (
    "This was saved while the run was going on; what came of it is not known here."
)


class NotebookScreen:
    """One output of a cell: widgets while the run goes on, text and HTML in the end and in what is saved meanwhile."""

    def __init__(self, make_board: Callable[[], Board] = Board) -> None:
        self._make_board = make_board
        self._board: Board | None = None
        self._display_id = ""
        self._next_s = 0.0

    def show(self, state: RunState) -> None:
        """Show a state; the first one makes the output."""
        if not self._display_id:
            self._open(state)
        elif state.at_s >= self._next_s:
            self._publish(state, is_over=False)
        if self._board is not None:
            self._board.show(state)

    def finish(self, state: RunState) -> None:
        """Replace the output by one that needs no kernel, and close the widgets."""
        self._publish(state, is_over=True)
        if self._board is not None:
            self._board.close()
            self._board = None

    def _open(self, state: RunState) -> None:
        try:
            self._board = self._make_board()
        except Exception:  # noqa: BLE001  # ipywidgets is missing, or does not work here: text and HTML do as well
            self._board = None
        self._publish(state, is_over=False)

    def _publish(self, state: RunState, *, is_over: bool) -> None:
        from IPython.display import display

        text = render.text(state)
        page = render.html(state)
        data: dict[str, object] = {"text/plain": text, "text/html": page}
        if not is_over:
            data["text/plain"] = f"{text}\n{WHILE_RUNNING}"
            if self._board is not None:
                data["text/html"] = f"{page}<p>{WHILE_RUNNING}</p>"
                data[_WIDGET_TYPE] = self._board.view
        is_first = not self._display_id
        if is_first:
            self._display_id = f"distmagic-{state.job}"
        display(data, raw=True, display_id=self._display_id, update=not is_first)
        every_s = _PLAIN_EVERY_S if self._board is None else _SAVED_EVERY_S
        size_bytes = len(str(data["text/html"]).encode())
        self._next_s = state.at_s + max(every_s, size_bytes / _BYTES_PER_S)
