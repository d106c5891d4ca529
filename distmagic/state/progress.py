"""Whether a rank has advanced, and whether a run hangs because none has.

Pure.
"""

from __future__ import annotations

import re
from operator import attrgetter

from distmagic.remote.wire.protocol import Bar
from distmagic.state.model import RunState, WorkerState

_C10D_LINE = re.compile(
    r"\[W\d{4} .*\[c10d\]|frame #\d+: |Exception raised from |<omitting python frames>|$"
)


def is_hung(state: RunState, hang_timeout_s: float | None) -> bool:
    """Whether no rank has advanced for `hang_timeout_s`.

    False while a connection is broken: its ranks may advance unseen. Also False while a rank waits
    for the user's input. A rank advances when it starts, reports, moves a bar or ends. Printing
    counts only for a rank that has never reported, except torch's warnings that it still waits for
    other ranks.
    """
    lost = state.lost
    is_blind = any(node.broken and node.node_rank not in lost for node in state.nodes)
    if state.paused or is_blind:
        return False
    if hang_timeout_s is None or state.stopping or state.is_over:
        return False
    still_s = state.at_s - state.advanced_at_s
    return bool(state.running) and still_s > hang_timeout_s


def has_shown_progress(worker: WorkerState) -> bool:
    """Whether a rank has ever reported or shown a bar.

    A rank that only prints may be silent for any time.
    """
    has_reported = bool(worker.metrics) and not worker.has_printed
    return worker.step is not None or bool(worker.bars) or has_reported


def is_of_a_wait(text: str) -> bool:
    """Whether a text has only c10d's output while a rank is unreachable: every 30 s a warning and a
    C++ stack.
    """
    return all(map(_C10D_LINE.match, text.splitlines()))


def have_moved(old: tuple[Bar, ...], new: tuple[Bar, ...]) -> bool:
    """Whether a bar has moved.

    An event alone does not prove it: tqdm's monitor thread also redraws stalled bars.
    """
    place = attrgetter("id", "n", "closed")
    return list(map(place, old)) != list(map(place, new))
