"""A run as text: the table for notebooks and logs, a terminal's status lines, and milestones for a log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distmagic.render import quantities as q
from distmagic.render.overview import Alert, Overview, overview
from distmagic.render.row_choice import PHASES
from distmagic.render.rows import Group, Row, state_word
from distmagic.render.shown import count_of_lines, shown_lines
from distmagic.render.text_width import columns_of, cut, cut_middle, pad, plain, wrapped
from distmagic.state.model import OutputLine, RunState

_GAP = "  "
_BAR = 10
_MIN_NOTE = (
    12  # columns; a note with less room is left out: the alerts tell the same in full
)
_MAX_METRICS = 8
_MAX_LINE = 300  # characters of one line of output
_MARKS = {"error": "✗", "warning": "!", "info": "·"}


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column with a cell for each row. The higher `spare`, the sooner it gives way when room is scarce."""

    title: str
    cells: tuple[str, ...]
    spare: int = 0
    right: bool = False

    @property
    def width(self) -> int:
        return max(columns_of(cell) for cell in (self.title, *self.cells))


def text(state: RunState, *, width: int = 100, lines: int = 10) -> str:
    """Return head, table, what to know, and the last `lines` lines of output, the table within `width` columns."""
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
    """Return at most `height` lines of at most `width` columns: head, the ranks that matter most, what is wrong."""
    view = overview(state)
    errors = [alert for alert in view.alerts if alert.level == "error"]
    alerts = [cut(_alert_line(alert), width) for alert in errors[:2]]
    room = max(0, height - 2 - len(alerts))  # 2: the head, and the titles of the table
    lines = [cut(_headline(view), width)]
    if room:
        rows = [
            row for group in view.groups if not group.is_folded for row in group.rows
        ]
        seen = Group(title="", rows=tuple(_most_urgent(rows, room)))
        lines += _table([seen], view.metrics, width)
    lines += alerts
    return tuple(lines[: max(1, height)])


def milestones(before: RunState | None, after: RunState) -> tuple[str, ...]:
    """Return what is worth a line in a log: the run's phase if it changed, and what went wrong meanwhile."""
    view = overview(after)
    old_phase = ""
    old_texts: set[str] = set()
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
    """Return `[rank 3 gpu-b]`, as every line of output begins."""
    return f"[{plain(line.label)}]"


def _alert_line(alert: Alert) -> str:
    return f"{_MARKS[alert.level]} {alert.text}"


def _most_urgent(rows: Sequence[Row], room: int) -> list[Row]:
    """Return the rows that want to be seen most, in their own order, and one that counts the others."""
    if len(rows) <= room:
        return list(rows)

    def urgency_of(index: int) -> tuple[int, bool, float]:
        row = rows[index]
        # A host without ranks has another phase, and comes first.
        phase = PHASES.index(row.phase) if row.phase in PHASES else -1
        return phase, not (row.slow or row.still), row.fraction or 0.0

    most_urgent_first = sorted(range(len(rows)), key=urgency_of)
    kept = [rows[index] for index in sorted(most_urgent_first[: room - 1])]
    left_out = len(rows) - len(kept)
    return [*kept, Row(name="", host=f"and {left_out} more", phase="")]


# ---- the table


def _table(groups: Sequence[Group], metrics: Sequence[str], width: int) -> list[str]:
    """Return the lines of the table: titles, and the rows of each group under its own title."""
    rows = [row for group in groups for row in group.rows]
    if not rows:
        return []
    columns = _fitting(_columns(rows, metrics[:_MAX_METRICS]), width)

    def line(texts: Iterable[str]) -> str:
        cells = [
            pad(text, c.width, right=c.right)
            for text, c in zip(texts, columns, strict=True)
        ]
        return cut(_GAP.join(cells).rstrip(), width)

    lines = [line(c.title for c in columns)]
    index = 0  # columns have the cells of all groups' rows, one after the other
    for group in groups:
        if group.title:
            lines.append(f"{group.title}:")
        for _ in group.rows:
            lines.append(line(c.cells[index] for c in columns))
            index += 1
    return lines


def _columns(rows: Sequence[Row], metrics: Sequence[str]) -> list[_Column]:
    """Return the columns that say anything. The last one, the notes, has no fixed width."""
    values = []
    for spare, name in enumerate(metrics, start=3):
        cells = tuple(
            q.number(row.metrics[name]) if name in row.metrics else "" for row in rows
        )
        values.append(
            _Column(title=plain(name)[:16], right=True, spare=spare, cells=cells)
        )
    steps = tuple(cut(row.count, 24) for row in rows)
    notes = tuple(row.remarks for row in rows)
    columns = [
        _Column(title="rank", cells=tuple(row.name for row in rows), right=True),
        _Column(title="host", cells=tuple(cut_middle(row.host, 24) for row in rows)),
        _Column(title="device", cells=tuple(row.device[:12] for row in rows), spare=10),
        _Column(title="GPU", cells=tuple(row.gpu for row in rows), spare=9),
        _Column(title="state", cells=tuple(state_word(row) for row in rows)),
        _Column(title="progress", cells=tuple(_progress(row) for row in rows), spare=1),
        _Column(title="step", cells=steps, right=True, spare=2),
        *values,
        _Column(
            title="rate", cells=tuple(row.rate for row in rows), right=True, spare=4
        ),
        _Column(
            title="left", cells=tuple(row.left for row in rows), right=True, spare=3
        ),
        _Column(title="", cells=notes),
    ]
    return [
        column for column in columns if column.title == "state" or any(column.cells)
    ]


def _progress(row: Row) -> str:
    if row.fraction is None:
        return ""
    full = int(row.fraction * _BAR)
    bar = "█" * full + "░" * (_BAR - full)
    return f"{bar} {q.percent(row.fraction):>4}"


def _fitting(columns: list[_Column], width: int) -> list[_Column]:
    """Leave out columns, the most dispensable first, until a line is within `width`; the note takes what is left."""
    note = next((c for c in columns if not c.title), None)
    columns = [c for c in columns if c.title]
    while _width(columns) > width and any(c.spare for c in columns):
        columns.remove(max(columns, key=lambda c: c.spare))
    room = width - _width(columns) - len(_GAP)
    if note is None or room < min(_MIN_NOTE, note.width):
        return columns
    cells = tuple(cut(cell, room) for cell in note.cells)
    return [*columns, _Column(title="", cells=cells)]


def _width(columns: Sequence[_Column]) -> int:
    gaps = len(columns) - 1
    return sum(c.width for c in columns) + len(_GAP) * gaps
