"""A run as text: the table for notebooks and logs, status lines for a terminal, and milestones for
a log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distmagic.render import quantities as q
from distmagic.render.output import count_of_lines, shown_lines
from distmagic.render.overview import Alert, Overview, overview
from distmagic.render.rows import Group, columns, fitting, under_titles
from distmagic.render.table import GAP, Column, text_lines
from distmagic.render.text_width import cut, plain, wrapped
from distmagic.state.model import OutputLine, RunState

# columns; a narrower note is left out, because the alerts have the full text
_MIN_NOTE = 12
_MAX_LINE = 300  # characters of one line of output
_MARKS = {"error": "✗", "warning": "!", "info": "·"}


def text(state: RunState, *, width: int = 100, lines: int = 10) -> str:
    """Return head, table, notes, and the last `lines` lines of output; the table has at most
    `width` columns.
    """
    view = overview(state)
    parts = wrapped(_headline(view), width, "    ")
    shown_groups = [group for group in view.groups if not group.is_folded]
    parts += _table(shown_groups, view.metrics, width)
    for alert in view.alerts:
        parts += wrapped(_alert_line(alert), width, "  ")
    shown = shown_lines(state)[-lines:] if lines > 0 else ()
    if shown:
        seen = count_of_lines(state)
        parts.append(
            f"last {len(shown)} of {seen:,} lines of output; all of a rank's: {state.variable}.logs(rank)"
        )
    for line in shown:
        words = cut(plain(line.text), _MAX_LINE)
        parts.append(f"{label(line)} {words}")
    return "\n".join(part.rstrip() for part in parts)


def status(state: RunState, *, width: int, height: int) -> tuple[str, ...]:
    """Return at most `height` lines of at most `width` columns: head, the most important ranks,
    errors.
    """
    view = overview(state)
    errors = [alert for alert in view.alerts if alert.level == "error"]
    alerts = [cut(_alert_line(alert), width) for alert in errors[:2]]
    room = max(0, height - 2 - len(alerts))  # 2: the head, and the titles of the table
    lines = [cut(_headline(view), width)]
    if room:
        rows = [
            row for group in view.groups if not group.is_folded for row in group.rows
        ]
        seen = Group("", fitting(rows, room, noun="rows"))
        lines += _table([seen], view.metrics, width)
    lines += alerts
    return tuple(lines[: max(1, height)])


def milestones(before: RunState | None, after: RunState) -> tuple[str, ...]:
    """Return lines for a log: a change of the run's phase, and new errors."""
    view = overview(after)
    old_phase = ""
    old_texts = set()
    if before is not None:
        old = overview(before)
        old_phase = old.phase
        old_texts = {alert.text for alert in old.alerts}
    lines = []
    if view.phase != old_phase:
        lines.append(_headline(view))
    for alert in view.alerts:
        if alert.text not in old_texts:
            lines.append(_alert_line(alert))
    return tuple(lines)


def headline(state: RunState) -> str:
    """Return `running 62% · 4 ranks on gpu-a, gpu-b · 1 min 23 s · 45 s left`."""
    return _headline(overview(state))


def _headline(view: Overview) -> str:
    phase: str = view.phase
    if view.fraction is not None:
        phase += f" {q.percent(view.fraction)}"
    parts = (phase, *view.facts, view.concern)
    return " · ".join(part for part in parts if part)


def label(line: OutputLine) -> str:
    """Return `[rank 3 gpu-b]`, the prefix of every line of output."""
    return f"[{plain(line.label)}]"


def _alert_line(alert: Alert) -> str:
    return f"{_MARKS[alert.level]} {alert.text}"


# ---- the table


def _table(groups: Sequence[Group], metrics: Sequence[str], width: int) -> list[str]:
    """Return the lines of the table: titles, and the rows of each group under its own title."""
    if not any(group.rows for group in groups):
        return []
    # The least important columns are left out, and the note is cut to what remains.
    every = columns(groups, metrics)
    fixed = [column for column in every if column.key != "note"]
    while _width(fixed) > width and any(column.spare for column in fixed):
        fixed.remove(max(fixed, key=lambda column: column.spare))
    room = width - _width(fixed) - len(GAP)
    note = every[-1]
    if note.key == "note" and room >= min(_MIN_NOTE, note.width):
        cells = [cut(cell, room) for cell in note.cells]
        fixed.append(replace(note, title="", cells=cells))
    lines = [cut(line, width) for line in text_lines(fixed)]
    return under_titles(groups, lines, "{}:".format)


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + len(GAP) * (len(columns) - 1)
