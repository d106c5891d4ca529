"""A screen that changes each state before it is shown: adds the run's variable, or rewords texts for a terminal."""

from __future__ import annotations

from collections.abc import Callable

from distmagic.render.screen import Screen, UserRequest
from distmagic.state.model import RunState


class ChangedScreen:
    """Shows the result of `change` for each state on another screen."""

    def __init__(self, inner: Screen, change: Callable[[RunState], RunState]) -> None:
        self._inner = inner
        self._change = change

    def announce(self, text: str) -> None:
        """Show nothing: messages before a run are not changed."""

    def show(self, state: RunState) -> None:
        """Show a state."""
        self._inner.show(self._change(state))

    def finish(self, state: RunState) -> None:
        """Show the last state."""
        self._inner.finish(self._change(state))

    def requests(self) -> tuple[UserRequest, ...]:
        """Return the user's requests on the other screen."""
        return self._inner.requests()

    def can_type(self) -> bool:
        """Whether the user can type on the other screen."""
        return self._inner.can_type()
