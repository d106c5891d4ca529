"""One output of a notebook's cell: text and HTML that need no kernel, replaced by the live view in
an open page.
"""

from __future__ import annotations

import importlib.util
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from distmagic import render
from distmagic.connection.prompts import asker_of
from distmagic.render.screen import Screen, UserRequest
from distmagic.screens import cell_runs
from distmagic.screens.board import Board
from distmagic.screens.cell_runs import CellRuns
from distmagic.screens.lines import Questions, write
from distmagic.state.model import RunState

# A saved notebook contains the output as text and HTML. Next to a live view it is updated rarely;
# if no page shows a live view, it is the view.
_SAVED_EVERY_S = 120.0
_PLAIN_EVERY_S = 0.5
_BYTES_PER_S = 100_000
_WIDGET_TYPE = "application/vnd.jupyter.widget-view+json"
# If no page shows the run, as under nbconvert and papermill, a long run prints lines for a log.
_LINES_FROM_S = 60.0
_LINE_EVERY_S = 30.0
# Views of finished runs that are kept, for pages that are loaded later.
_KEPT_VIEWS = 4
WHILE_RUNNING = "This was saved during the run; its outcome was not saved."
# time for a page to report that it shows the view, before the kernel asks a rank's question
_PAGE_S = 5.0
AT_FIRST = "This text is replaced during the run."

_ended: deque[CellRuns] = deque()


def _ask(question: str) -> str:
    """Ask by the kernel's input function, and wait for the answer."""
    try:
        return f"{input(question)}\n"
    except EOFError:
        return ""


class NotebookScreen(Screen):
    """One output of a cell. In a page the live view replaces it, during the run and after it.

    Consecutive runs of one cell share it: see cell_runs.py. The saved output refers to no widget: a
    reloaded page shows it at once, with or without a kernel.
    """

    def __init__(
        self,
        make_board: Callable[[str], Board] = Board,
        *,
        in_background: bool = False,
    ) -> None:
        """A background run has no lines for a log, and shares its output with no other run."""
        self._make_board = make_board
        self._in_background = in_background
        self._cell = cell_runs.alone()
        self._board: Board | None = None
        self._has_cell = False
        self._next_s = 0.0
        self._shown_notices: tuple[str, ...] = ()
        self._next_line_s = _LINES_FROM_S
        self._told: RunState | None = None  # the state in the last line
        self._state: RunState | None = None
        self._opened_s = 0.0
        self._questions = Questions(_ask)

    def announce(self, text: str) -> None:
        """Show a short text in the output of the run."""
        self._begin_cell()
        html = self._until_view(render.announcement(text))
        self._display({"text/plain": text, "text/html": html})

    def show(self, state: RunState) -> None:
        """Show a state; the first one creates the output."""
        is_first = self._state is None
        self._state = state
        if is_first:
            self._opened_s = state.at_s
            self._open(state)
        # Whether there is something new about pending nodes. Before a job exists, its clock stands
        # still.
        elif state.at_s >= self._next_s or (
            not state.job and state.notices != self._shown_notices
        ):
            self._publish(state, is_over=False)
        if self._board is not None:
            self._board.show(state)
        is_unseen = not self._in_background and not self._has_page
        if is_unseen and state.at_s >= self._next_line_s:
            self._next_line_s = state.at_s + _LINE_EVERY_S
            self._tell(state)

    def finish(self, state: RunState) -> None:
        """Replace the output by one that needs no kernel.

        A page that shows the live view gets its last state, too.
        """
        if self._state is None:
            self._open(state)  # it ended before it was shown
        self._cell.add(state)
        html, text = self._publish(state, is_over=True)
        if self._told is not None:
            self._tell(state)
        board, self._board = self._board, None
        if board is None:
            return
        if not board.has_page or board.mime_view:
            board.close()
            return
        board.finish(state, html, text)
        self._cell.board = board
        _ended.append(self._cell)
        if len(_ended) > _KEPT_VIEWS:
            _ended.popleft().close()

    def requests(self) -> tuple[UserRequest, ...]:
        """Return the user's requests in the live view, and input for a rank if no view can
        take it.
        """
        board, state = self._board, self._state
        asked = () if board is None else board.requests()
        if self._in_background or state is None:
            return asked
        is_early = state.at_s - self._opened_s < _PAGE_S
        takes_lines = board is not None and not board.mime_view
        if takes_lines and (self._has_page or is_early):
            return asked  # a page accepts input while the cell runs, or may do so soon
        return (*asked, *self._questions.typed(state))

    def can_type(self) -> bool:
        """Whether the front end accepts input; in the background only a live view does."""
        has_view = importlib.util.find_spec("anywidget") is not None
        return asker_of().can_ask and (has_view or not self._in_background)

    @property
    def _has_page(self) -> bool:
        return self._board is not None and self._board.has_page

    def _tell(self, state: RunState) -> None:
        """Print the state of the run, and new errors since the last line."""
        headline = render.headline(state)
        news = [
            line for line in render.milestones(self._told, state) if line != headline
        ]
        write(sys.stdout, "".join(f"{line}\n" for line in (headline, *news)))
        self._told = state

    def _begin_cell(self) -> None:
        """Choose the run's output: that of earlier runs of this cell, or a new one."""
        if not (self._in_background or self._has_cell):
            self._cell = cell_runs.begin()
        self._has_cell = True

    def _open(self, state: RunState) -> None:
        self._begin_cell()
        if self._cell.board is None:
            # At once: the first widget of a kernel takes 0.2 s.
            self._publish(state, is_over=False, is_first=True)
        for ended in tuple(_ended):
            if ended is self._cell or ended.is_replaced_by(self._cell):
                # A page that is loaded within half a second has not reported that it was cleared.
                with suppress(ValueError):  # a run in the background has ended just now
                    _ended.remove(ended)
                ended.close()
        try:
            self._board = self._make_board(self._cell.view_id)
            self._board.is_in_background = self._in_background
        except Exception:  # noqa: BLE001  # anywidget is missing, or does not work here: text and HTML do as well
            self._board = None
        self._publish(state, is_over=False)

    def _publish(
        self, state: RunState, *, is_over: bool, is_first: bool = False
    ) -> tuple[str, str]:
        """Write the output, and return its HTML and its text."""
        board = self._board
        if not is_over and self._has_page:
            # The live view is visible. This is for a document that is opened later, without a
            # kernel.
            state = replace(state, seen_unix_s=time.time())
        text, html = render.text(state), render.html(state)
        if is_first:
            text, html = f"{text}\n{AT_FIRST}", self._until_view(html)
        elif not is_over:
            text = f"{text}\n{WHILE_RUNNING}"
        if not is_over and self._has_page:
            html = f"{html}<p>{WHILE_RUNNING}</p>"
        if board is not None and (board.has_page or not is_over):
            html = f'<div class="dm-view-{board.view_id}">{html}</div>'
        table, table_text = self._cell.table(is_over=is_over)
        html, text = table + html, table_text + text
        data: dict[str, object] = {"text/plain": text, "text/html": html}
        if board is not None and board.mime_view and not is_over:
            data[_WIDGET_TYPE] = board.mime_view
        self._display(data)
        self._shown_notices = state.notices
        every_s = _SAVED_EVERY_S if self._has_page else _PLAIN_EVERY_S
        self._next_s = state.at_s + max(every_s, len(html.encode()) / _BYTES_PER_S)
        return html, text

    def _until_view(self, html: str) -> str:
        """Return HTML that is hidden once there is a live view.

        An output inside another widget (ipywidgets' `Output`) is never updated: in it the page
        hides the HTML.
        """
        return f'<div class="dm-before-{self._cell.view_id}">{html}</div>'

    def _display(self, data: Mapping[str, object]) -> None:
        """Create the output, or replace it."""
        from IPython.display import display

        is_new = not self._cell.display_id
        if is_new:
            self._cell.display_id = f"distmagic-{secrets.token_hex(8)}"
        display(data, raw=True, display_id=self._cell.display_id, update=not is_new)
