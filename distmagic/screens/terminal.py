"""A terminal: output of the ranks scrolls by, and a few lines below it say how the run is."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

from distmagic import render
from distmagic.render.screen import UserRequest
from distmagic.screens.lines import (
    Questions,
    is_terminal,
    line_of_terminal,
    new_lines,
    without_colours,
    write,
)
from distmagic.state.model import OutputLine, RunState

_STATUS_LINES = 10
_LABEL_COLOURS = (94, 33, 32, 35, 36, 91, 34, 95)  # by rank, as ANSI colour codes
_TORCHRUN_COLOUR = 90


class TerminalScreen:
    """Output of the ranks as it comes, and below it a few lines that are drawn again and again.

    `size` returns the size of the window, which the user may change meanwhile.
    """

    def __init__(
        self, stream: TextIO, size: Callable[[], os.terminal_size], *, colours: bool
    ) -> None:
        self._stream = stream
        self._size = size
        self._colours = colours
        self._status: tuple[str, ...] = ()
        self._seen = 0
        self._state: RunState | None = None
        self._questions = Questions(line_of_terminal)

    def announce(self, text: str) -> None:
        """Do nothing: what comes before a run prints for itself here."""

    def show(self, state: RunState) -> None:
        """Print new lines, and draw the status again where it changed; in its place the question of a rank that waits."""
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
        """Print the last lines and the final table in place of the status."""
        table = render.text(state, width=self._width(), lines=0)
        output = "".join(f"{line}\n" for line in [*self._new_lines(state), table])
        write(self._stream, self._erased() + output)
        self._status = ()

    def requests(self) -> tuple[UserRequest, ...]:
        """Return the line that the user has typed for a rank; else an interrupt is all that a user can do here."""
        return self._questions.typed(self._state)

    def can_type(self) -> bool:
        """Whether standard input is a terminal, too."""
        return is_terminal()

    def _width(self) -> int:
        columns, _ = self._size()
        # Many terminals break a line that fills the last column.
        return max(20, columns - 1)

    def _erased(self) -> str:
        """Return what takes the status away, also where the window has become narrower since."""
        if not self._status:
            return ""
        columns, _ = self._size()
        columns = max(1, columns)
        rows = 0
        for line in self._status:
            # A line that is too long now fills several rows.
            rows += max(1, -(-render.columns_of(line) // columns))
        to_first_row = f"\x1b[{rows - 1}A" if rows > 1 else ""
        return f"\r{to_first_row}\x1b[J"

    def _new_lines(self, state: RunState) -> list[str]:
        lines, self._seen = new_lines(state, self._seen)
        return [self._written(line) for line in lines]

    def _written(self, line: OutputLine | str) -> str:
        if isinstance(line, str) or not self._colours:
            return without_colours(line)
        colour = _TORCHRUN_COLOUR
        if line.rank >= 0:
            colour = _LABEL_COLOURS[line.rank % len(_LABEL_COLOURS)]
        label = f"\x1b[{colour}m{render.label(line)}\x1b[0m"
        return f"{label} {render.coloured(line.text)}"
