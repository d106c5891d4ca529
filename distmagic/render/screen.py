"""The interface between a run and the place where a user sees it.

The package `screens` implements it.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from distmagic.remote.frozen import frozen
from distmagic.state.model import RunState


@frozen
class TypedLine:
    """A line of input from the user for a rank that waits at this `prompt`.

    `is_end`: the end of input instead.
    """

    rank: int
    prompt: int
    text: str = field(default="", repr=False)
    is_end: bool = False


# The user's requests: stop the run, show the stacks, detach, send input to a rank.
UserRequest = Literal["stop", "stacks", "detach"] | TypedLine


class Screen:
    """A place that shows a run. This one shows nothing; others override what they do.

    The thread of the run's loop calls all methods but `announce`.
    """

    def announce(self, text: str) -> None:
        """Show a short text for a run that has not started; called on any thread, before the first
        `show`.
        """

    def show(self, state: RunState) -> None:
        """Show a state of a running run; called at most 10 times a second."""

    def finish(self, state: RunState) -> None:
        """Show the last state for good, without the live view."""

    def requests(self) -> tuple[UserRequest, ...]:
        """Return the user's requests since the last call, in order.

        An interrupt may raise KeyboardInterrupt in it, because a kernel's own input blocks for an
        answer.
        """
        return ()

    def can_type(self) -> bool:
        """Whether the user can type input for a rank on this screen."""
        return False


class OuterScreen(Screen):
    """Shows a run on another screen, which also has the user's requests.

    It passes on no message before the run.
    """

    def __init__(self, inner: Screen) -> None:
        self._inner = inner

    def requests(self) -> tuple[UserRequest, ...]:
        """Return the user's requests on the other screen."""
        return self._inner.requests()

    def can_type(self) -> bool:
        """Whether the user can type on the other screen."""
        return self._inner.can_type()
