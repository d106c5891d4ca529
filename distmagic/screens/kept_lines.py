"""Lines of output that a kernel keeps for live views: a page shows the last thousand and can
request earlier ones.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from typing import Any

from distmagic import render
from distmagic.state.model import OutputLine, RunState

_KEPT = 10_000  # lines
_KEPT_CHARS = 4_000_000
MOST_BYTES = 200_000  # limit of one answer


class KeptLines:
    """The last lines of one run, numbered from 0 at the start of the run.

    The thread of the run's loop calls `add`; any thread may call `last` and `before`.
    """

    def __init__(self) -> None:
        self._lines: deque[tuple[int, OutputLine]] = deque()
        self._chars = 0
        self._next = 0  # number of the first line that was not seen
        # Whether torchrun's own lines are shown.
        self.shows_torchrun = False
        self._lock = threading.Lock()

    def add(self, state: RunState) -> None:
        """Keep the new lines of this state; drop the oldest ones."""
        first = state.lines_seen - len(state.lines)
        new = state.lines[max(0, self._next - first) :]
        with self._lock:
            self.shows_torchrun = render.torchrun_matters(state)
            for number, line in enumerate(new, start=state.lines_seen - len(new)):
                self._lines.append((number, line))
                self._chars += len(line.text)
            self._next = state.lines_seen
            while len(self._lines) > _KEPT or self._chars > _KEPT_CHARS:
                _, oldest = self._lines.popleft()
                self._chars -= len(oldest.text)

    def last(self, count: int, room_bytes: int = MOST_BYTES) -> dict[str, Any]:
        """Return the last `count` lines as `before` does, with the number of all lines so far in
        `total`.
        """
        total = self._next
        return {**self.before(total, count, room_bytes), "total": total}

    def before(
        self, end: int, count: int, room_bytes: int = MOST_BYTES
    ) -> dict[str, Any]:
        """Return the lines before number `end`: at most `count`, and at most `room_bytes`.

        `first` is the number from which all kept lines are in `lines`, or `end` if no earlier line
        is kept. A line has number, rank and HTML. A gap, where lines came too fast to be kept, is
        an entry with the first missing number, None, and the first number after it.
        """
        with self._lock:
            kept = [entry for entry in self._lines if entry[0] < end]
            shows_torchrun = self.shows_torchrun
        first = end
        upward: list[tuple[int, int | None, str | int]] = []
        for number, line in islice(reversed(kept), count):
            html = render.log_line(line)
            room_bytes -= len(html.encode())
            if room_bytes < 0 and upward:
                break
            if number + 1 < first:
                upward.append((number + 1, None, first))
            if line.rank >= 0 or shows_torchrun:
                upward.append((number, line.rank, html))
            first = number
        upward.reverse()
        return {"first": first, "lines": upward}
