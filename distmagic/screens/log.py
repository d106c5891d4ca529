"""Plain lines, for a pipe, a file, a simple terminal, or a background run."""

from __future__ import annotations

import sys
from typing import TextIO

from distmagic import render
from distmagic.render.screen import Screen
from distmagic.screens.lines import LineScreen, write
from distmagic.state.model import RunState

_LOG_EVERY_S = 30.0
_LOOK_EVERY_S = 1.0


class LogScreen(LineScreen):
    """Plain lines: output as it arrives, changes of the run, progress from time to time, and the
    table at the end.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._next_s = self._next_look_s = 0.0
        self._looked_at: RunState | None = None  # the state that was last looked at

    def show(self, state: RunState) -> None:
        """Print the output and the changes since the last call."""
        self._print(self._new_lines(state) + self._milestones(state))
        self._state = state

    def _milestones(self, state: RunState) -> list[str]:
        before = self._looked_at
        # A look at thousands of ranks takes tens of milliseconds.
        is_early = state.at_s < self._next_look_s
        is_same = before is not None and (before.phase, before.paused) == (state.phase, state.paused)  # fmt: skip
        if is_early and is_same:
            return []
        self._next_look_s = state.at_s + _LOOK_EVERY_S
        self._looked_at = state
        milestones = list(render.milestones(before, state))
        if not milestones and state.at_s >= self._next_s:
            milestones = [render.headline(state)]
        if milestones:
            self._next_s = state.at_s + _LOG_EVERY_S
        return milestones

    def finish(self, state: RunState) -> None:
        """Print the last lines and the final table."""
        self._print([*self._new_lines(state), render.text(state, lines=0)])

    def _print(self, lines: list[str]) -> None:
        if lines:
            write(self._stream, "".join(f"{line}\n" for line in lines))


class QuietScreen(Screen):
    """Shows only the table at the end: for a background run in a terminal or a script."""

    def finish(self, state: RunState) -> None:
        """Print the table to the current stdout, because IPython's prompt redirects it."""
        write(sys.stdout, f"{render.text(state, lines=0)}\n")
