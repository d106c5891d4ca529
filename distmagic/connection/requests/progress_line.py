"""One line on stderr with the progress of a transfer."""

from __future__ import annotations

import sys
import time

from distmagic import sanitize

_TELL_S = 0.5


class ProgressLine:
    """The line of one file: updated during the transfer, and once more at the end."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._moved_bytes = 0
        self._began_s = self._told_s = time.monotonic()

    def begin_at(self, size_bytes: int) -> None:
        """Start: so many bytes were transferred before."""
        self._done_bytes = size_bytes

    def add(self, size_bytes: int) -> None:
        """Count transferred bytes, and update the line from time to time."""
        self._done_bytes += size_bytes
        self._moved_bytes += size_bytes
        if time.monotonic() - self._told_s > _TELL_S:
            self._tell("\r")

    def end(self) -> None:
        """Write the total."""
        self._tell("\n")

    def _tell(self, end: str) -> None:
        self._told_s = time.monotonic()
        past_s = max(self._told_s - self._began_s, 1e-9)
        rate = f"{self._moved_bytes / past_s / 1e6:,.0f} MB/s"
        done = f"{self._done_bytes / 1e6:,.0f} of {self._total_bytes / 1e6:,.0f} MB"
        text = sanitize.line(f"{self._what}: {done} ({rate})")
        print(f"\r{text}", end=end, file=sys.stderr, flush=True)  # noqa: T201  # a line for people
