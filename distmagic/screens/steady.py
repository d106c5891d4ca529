"""A screen whose failure does not end the run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TypeVar

from distmagic import render
from distmagic.render.screen import OuterScreen, UserRequest
from distmagic.screens.lines import write
from distmagic.state.model import RunState

T = TypeVar("T")


class SteadyScreen(OuterScreen):
    """Shows a run on another screen; after that screen's first failure the live view ends, with a
    message on stderr.
    """

    _is_broken = False

    def announce(self, text: str) -> None:
        """Show a short text before the run."""
        if not self._is_broken:
            self._try(self._inner.announce, text)

    def show(self, state: RunState) -> None:
        """Show a state, unless an earlier one could not be shown."""
        if not self._is_broken:
            self._try(self._inner.show, state)

    def finish(self, state: RunState) -> None:
        """Show the last state, at worst as plain text on stderr."""
        self._is_broken = False  # the last state is worth another try
        self._try(self._inner.finish, state)
        if self._is_broken:
            _write_if_possible(f"{render.text(state)}\n")

    def requests(self) -> tuple[UserRequest, ...]:
        """Return the user's requests on the other screen."""
        return () if self._is_broken else super().requests()

    def _try(self, act: Callable[[T], None], shown: T) -> None:
        try:
            act(shown)
        except Exception as error:  # noqa: BLE001  # whatever it is, ranks are worth more than their picture
            self._is_broken = True
            _write_if_possible(
                f"distmagic can't show the run: {type(error).__name__}: {error}. The run continues.\n"
            )


def _write_if_possible(text: str) -> None:
    """Write to stderr, or else to the process's own: a kernel's stderr breaks with the same socket
    as the screen.
    """
    try:
        write(sys.stderr, text)
    except Exception:  # noqa: BLE001 - a kernel's stream raises errors of its messaging library
        if sys.__stderr__ is not None:
            # It is closed too: the message can't be written anywhere.
            with contextlib.suppress(OSError, ValueError):
                write(sys.__stderr__, text)
