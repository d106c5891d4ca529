"""The interface between a run and the place where a user sees it. The package `screens` implements it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from distmagic.state.model import RunState


@dataclass(frozen=True, kw_only=True)
class TypedLine:
    """A line that a user has typed for a rank that waits for one at this `prompt`. `is_end`: the end of all, in its place."""

    rank: int
    prompt: int
    text: str = field(default="", repr=False)
    is_end: bool = False


# What a user may ask for: end the run, see where its ranks are, let it go on alone, hand a line to a rank.
UserRequest = Literal["stop", "stacks", "detach"] | TypedLine


class Screen(Protocol):
    """Where a run is shown. All methods are called on the thread of the run's loop."""

    def show(self, state: RunState) -> None:
        """Show a state of a run that goes on; called at most 10 times a second."""

    def finish(self, state: RunState) -> None:
        """Show the last state for good: nothing of the live view is left."""

    def requests(self) -> tuple[UserRequest, ...]:
        """Return what the user has asked for since the last call, in order.

        An interrupt may raise KeyboardInterrupt in it: a kernel's own input waits for an answer.
        """

    def can_type(self) -> bool:
        """Whether the user can type a line here for a rank."""


class AnnouncingScreen(Screen, Protocol):
    """One that shows before the run, too, what goes on."""

    def announce(self, text: str) -> None:
        """Show a few words in place of a run that has not begun; called on any thread, before the first `show`."""
