"""The interface between a run and the place where a user sees it. The package `screens` implements it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from distmagic.state.model import RunState


@dataclass(frozen=True, kw_only=True)
class TypedLine:
    """A line of input from the user for a rank that waits at this `prompt`. `is_end`: the end of input instead."""

    rank: int
    prompt: int
    text: str = field(default="", repr=False)
    is_end: bool = False


# The user's requests: stop the run, show the stacks, detach, send input to a rank.
UserRequest = Literal["stop", "stacks", "detach"] | TypedLine


class Screen(Protocol):
    """A place that shows a run. The thread of the run's loop calls all methods."""

    def show(self, state: RunState) -> None:
        """Show a state of a running run; called at most 10 times a second."""

    def finish(self, state: RunState) -> None:
        """Show the last state for good, without the live view."""

    def requests(self) -> tuple[UserRequest, ...]:
        """Return the user's requests since the last call, in order.

        An interrupt may raise KeyboardInterrupt in it, because a kernel's own input blocks for an answer.
        """

    def can_type(self) -> bool:
        """Whether the user can type input for a rank on this screen."""


class AnnouncingScreen(Screen, Protocol):
    """A screen that also shows messages before the run."""

    def announce(self, text: str) -> None:
        """Show a short text for a run that has not started; called on any thread, before the first `show`."""
