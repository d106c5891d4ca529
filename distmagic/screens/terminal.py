"""A terminal: output of the ranks scrolls, and a few lines below it show the run's state."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

from distmagic import render
from distmagic.screens.lines import LineScreen, write
from distmagic.state.model import OutputLine, RunState

_STATUS_LINES = 10
_LABEL_COLOURS = (94, 33, 32, 35, 36, 91, 34, 95)  # by rank, as ANSI colour codes
_TORCHRUN_COLOUR = 90


class TerminalScreen(LineScreen):
    """Output of the ranks as it arrives, and below it a few lines that are redrawn.

    `size` returns the size of the window, which the user may change meanwhile.
    """

    def __init__(
        self, stream: TextIO, size: Callable[[], os.terminal_size], *, colours: bool
    ) -> None:
        super().__init__(stream)
        self._size = size
        self._colours = colours
        self._status: tuple[str, ...] = ()

    def show(self, state: RunState) -> None:
        """Print new lines, and redraw the status, or the question of a rank that waits for input,
        if changed.
        """
        asks_anew = self._state is None or state.paused != self._state.paused
        self._state = state
        status: tuple[str, ...]
        if state.paused:
            status = (render.question(state)[-self._width() :],)
        else:
            _, rows = self._size()
            height = max(1, min(_STATUS_LINES, rows - 2))
            status = render.status(state, width=self._width(), height=height)
        lines = self._new_lines(state)
        if lines or status != self._status or asks_anew:
            output = "".join(f"{line}\n" for line in lines)
            write(self._stream, self._erased() + output + "\n".join(status))
            self._status = status

    def finish(self, state: RunState) -> None:
        """Replace the status by the last lines and the final table."""
        table = render.text(state, width=self._width(), lines=0)
        output = "".join(f"{line}\n" for line in [*self._new_lines(state), table])
        write(self._stream, self._erased() + output)
        self._status = ()

    def _width(self) -> int:
        columns, _ = self._size()
        # Many terminals wrap a line that fills the last column.
        return max(20, columns - 1)

    def _erased(self) -> str:
        """Return the characters that erase the status, even if the window has become narrower."""
        if not self._status:
            return ""
        columns, _ = self._size()
        columns = max(1, columns)
        rows = 0
        for line in self._status:
            # A line that is too long now takes several rows.
            rows += max(1, -(-render.columns_of(line) // columns))
        to_first_row = f"\x1b[{rows - 1}A" if rows > 1 else ""
        return f"\r{to_first_row}\x1b[J"

    def _written(self, line: OutputLine) -> str:
        """Return a line with its rank as a prefix."""
        if not self._colours:
            return super()._written(line)
        colour = _TORCHRUN_COLOUR
        if line.rank >= 0:
            colour = _LABEL_COLOURS[line.rank % len(_LABEL_COLOURS)]
        label = f"\x1b[{colour}m{render.label(line)}\x1b[0m"
        return f"{label} {render.coloured(line.text)}"
