"""A screen that also writes the run to an experiment tracker.

A failing tracker does not end the run.
"""

from __future__ import annotations

import sys

from distmagic.render.screen import OuterScreen, Screen
from distmagic.state.model import RunState
from distmagic.tracking.points import Unsent
from distmagic.tracking.writers import Writer, writer_for


class TrackedScreen(OuterScreen):
    """Shows a run on another screen, and writes its points to the tracker named by `--track`."""

    def __init__(self, inner: Screen, tracker: str) -> None:
        super().__init__(inner)
        self._tracker = tracker
        self._unsent = Unsent()
        self._writer: Writer | None = None
        self._has_failed = False

    def show(self, state: RunState) -> None:
        """Show a state, and write its new points."""
        self._inner.show(state)
        self._write(state, is_last=False)

    def finish(self, state: RunState) -> None:
        """Show the last state, and write the remaining points."""
        self._inner.finish(state)
        self._write(state, is_last=True)

    def _write(self, state: RunState, *, is_last: bool) -> None:
        if self._has_failed:
            return
        try:
            points = self._unsent.take(state)
            if points and self._writer is None:
                self._writer = writer_for(self._tracker, state)
            if self._writer is not None:
                self._writer.write(points)
                if is_last:
                    self._writer.close(has_failed=state.phase != "done")
        except Exception as error:  # noqa: BLE001 - whatever it is, the run is worth more than its copy
            self._has_failed = True
            why = f"{type(error).__name__}: {error}"
            sys.stderr.write(
                f"--track {self._tracker} has failed: {why}. The run continues, and run.metrics has all values.\n",
            )
