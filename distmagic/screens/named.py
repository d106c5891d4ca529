"""A screen whose words name the variable that has the run."""

from __future__ import annotations

from dataclasses import replace

from distmagic.render.screen import Screen, UserRequest
from distmagic.state.model import RunState


class NamedScreen:
    """Shows a run on another screen, as one that `variable` has."""

    def __init__(self, inner: Screen, variable: str) -> None:
        self._inner = inner
        self._variable = variable

    def show(self, state: RunState) -> None:
        """Show a state."""
        self._inner.show(replace(state, variable=self._variable))

    def finish(self, state: RunState) -> None:
        """Show the last state."""
        self._inner.finish(replace(state, variable=self._variable))

    def requests(self) -> tuple[UserRequest, ...]:
        """Return what the user has asked for on the other screen."""
        return self._inner.requests()
