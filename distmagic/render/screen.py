"""The interface between a run and the place where a user sees it. The package `screens` implements it."""

from __future__ import annotations

from typing import Literal, Protocol

from distmagic.state.model import RunState

# What a user may ask for with a click: end the run, see where its ranks are, let it go on alone.
UserRequest = Literal["stop", "stacks", "detach"]


class Screen(Protocol):
    """Where a run is shown. All methods are called on the thread of the run's loop."""

    def show(self, state: RunState) -> None:
        """Show a state of a run that goes on; called at most 10 times a second."""

    def finish(self, state: RunState) -> None:
        """Show the last state for good: nothing of the live view is left."""

    def requests(self) -> tuple[UserRequest, ...]:
        """Return what the user has asked for since the last call, in order."""


class AnnouncingScreen(Screen, Protocol):
    """One that shows before the run, too, what goes on."""

    def announce(self, text: str) -> None:
        """Show a few words in place of a run that has not begun; called on any thread, before the first `show`."""
