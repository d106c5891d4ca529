"""Decides which lines of output are shown: all of the ranks', and torchrun's own where nothing else explains a failure."""

from __future__ import annotations

from collections.abc import Sequence

from distmagic.state.model import OutputLine, RunState

_PATIENCE_S = 10.0  # a start that takes longer than this may want torchrun's words


def shown_lines(state: RunState) -> tuple[OutputLine, ...]:
    """Return the last lines of output that are worth showing."""
    if torchrun_matters(state):
        return state.lines
    return tuple(line for line in state.lines if line.rank >= 0)


def without_tracebacks(
    state: RunState, lines: Sequence[OutputLine]
) -> list[OutputLine]:
    """Leave out the traceback that the first failed rank has printed: the alert about its failure unfolds to it."""
    first = (
        state.workers.get(state.first_failure)
        if state.first_failure is not None
        else None
    )
    if first is None or first.ended is None or first.ended.failure is None:
        return list(lines)
    told = {line.rstrip() for line in first.ended.failure.traceback.splitlines()}
    kept = []
    is_inside = False
    for line in lines:
        if line.rank == first.rank and line.stream == "stderr":
            is_inside = line.text.rstrip() in told and (
                is_inside or line.text.startswith("Traceback (most recent")
            )
            if is_inside:
                continue
        kept.append(line)
    return kept


def is_shown(state: RunState, line: OutputLine) -> bool:
    """Whether this line of output is worth showing."""
    return line.rank >= 0 or torchrun_matters(state)


def count_of_lines(state: RunState) -> int:
    """Return how many lines there were, without the hidden ones among those that are still in memory."""
    hidden = len(state.lines) - len(shown_lines(state))
    return state.lines_seen - hidden


def torchrun_matters(state: RunState) -> bool:
    """Whether torchrun's lines are the only explanation. torchrun also warns in runs that succeed, and whenever distmagic stops the ranks.

    All of its words stay in run.logs(-1).
    """
    if state.is_over:
        return state.phase == "failed" and state.first_failure is None
    return not state.workers and state.at_s > _PATIENCE_S
