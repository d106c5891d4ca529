"""A terminal: output of the ranks scrolls by, and a few lines below it say how the run is."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

from distmagic import render
from distmagic.screens.lines import new_lines, without_colours, write
from distmagic.state.model import OutputLine, RunState

_STATUS_LINES = 10
_LABEL_COLOURS = (94, 33, 32, 35, 36, 91, 34, 95)  # by rank, as ANSI colour codes
_TORCHRUN_COLOUR = 90


class TerminalScreen:
    """Output of the ranks as it comes, and below it a few lines that are drawn again and again.

    `size` returns the size of the window, which the user may change meanwhile.
    """

    def __init__(self, stream: TextIO, size: Callable[[], os.terminal_size], *, colours: bool) -> None:
        self._stream, self._size, self._colours = stream, size, colours
        self._status: tuple[str, ...] = ()
        self._seen = 0

    def show(self, state: RunState) -> None:
        """Print new lines, and draw the status again where it changed."""
        columns, rows = self._size()
        status = render.status(state, width=max(20, columns - 1), height=max(1, min(_STATUS_LINES, rows - 2)))
        lines = self._new_lines(state)
        if lines or status != self._status:
            output = "".join(f"{line}\n" for line in lines)
            write(self._stream, self._erased() + output + "\n".join(status))
            self._status = status

    def finish(self, state: RunState) -> None:
        """Print the last lines and the final table in place of the status."""
        table = render.text(state, width=max(20, self._size()[0] - 1), lines=0)
        lines = [*self._new_lines(state), table]
        write(self._stream, self._erased() + "".join(f"{line}\n" for line in lines))
        self._status = ()

    def _erased(self) -> str:
        """Return what takes the status away, also where the window has become narrower since."""
        if not self._status:
            return ""
        columns = max(1, self._size()[0])
        rows = 0
        for line in self._status:
            rows += max(1, -(-render.columns_of(line) // columns))  # a line that is too long now fills several rows
        to_first_row = f"\x1b[{rows - 1}A" if rows > 1 else ""
        return f"\r{to_first_row}\x1b[J"

    def _new_lines(self, state: RunState) -> list[str]:
        lines, self._seen = new_lines(state, self._seen)
        return [self._written(line) for line in lines]

    def _written(self, line: OutputLine | str) -> str:
        if isinstance(line, str) or not self._colours:
            return without_colours(line)
        colour = _TORCHRUN_COLOUR if line.rank < 0 else _LABEL_COLOURS[line.rank % len(_LABEL_COLOURS)]
        return f"\x1b[{colour}m{render.label(line)}\x1b[0m {render.coloured(line.text)}"
