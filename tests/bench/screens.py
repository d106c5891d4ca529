"""A screen for nobody, where what is shown is not what is measured."""

from __future__ import annotations

from distmagic.state.model import RunState


class Silent:
    """Shows nothing."""

    def announce(self, text: str) -> None:
        """Show nothing."""

    def show(self, state: RunState) -> None:
        """Show nothing."""

    def finish(self, state: RunState) -> None:
        """Show nothing."""

    def can_type(self) -> bool:
        """Say that nobody can."""
        return False

    def requests(self) -> tuple[str, ...]:
        """Return nothing."""
        return ()
