"""The interface between a run and the place where a user sees it. The package `screens` implements it."""

from __future__ import annotations

from typing import Protocol

from distmagic.state.model import RunState


class Screen(Protocol):
    """Where a run is shown. Both methods are called on the main thread."""

    def show(self, state: RunState) -> None:
        """Show a state of a run that goes on; called at most 10 times a second."""

    def finish(self, state: RunState) -> None:
        """Show the last state for good: nothing of the live view is left."""
