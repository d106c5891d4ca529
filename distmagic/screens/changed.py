"""A screen that changes each state before it is shown, such as rewording texts for a terminal."""

from __future__ import annotations

from collections.abc import Callable

from distmagic.render.screen import OuterScreen, Screen
from distmagic.state.model import RunState


class ChangedScreen(OuterScreen):
    """Shows the result of `change` for each state on another screen."""

    def __init__(self, inner: Screen, change: Callable[[RunState], RunState]) -> None:
        super().__init__(inner)
        self._change = change

    def show(self, state: RunState) -> None:
        """Show a state."""
        self._inner.show(self._change(state))

    def finish(self, state: RunState) -> None:
        """Show the last state."""
        self._inner.finish(self._change(state))
