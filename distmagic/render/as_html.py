"""A run as HTML that needs nothing else: no script, no widget, no file from elsewhere, light and dark.

The looks are in style.css, which travels with every page. What a notebook does with pages that it doesn't trust
(styles and drawings fall away) leaves a readable table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from pathlib import Path

from distmagic.render import quantities as q
from distmagic.render.curves import curves, palette
from distmagic.render.output import OUTPUT_LINES, about_output, output_lines, pictures
from distmagic.render.overview import Alert, Overview, overview
from distmagic.render.rows import MAX_HOSTS, Group, Row, state_word
from distmagic.render.text_width import cut, cut_middle, plain, spans
from distmagic.state.model import RunState

_MAX_METRICS = 6  # columns; all of them have a curve
_STATE_COLOURS = {
    "running": "#2f7fd6", "done": "#2f9e57", "failed": "#d9453d", "lost": "#d9453d",
    "slow": "#d98a1e", "stalled": "#d98a1e", "reconnecting": "#d98a1e",
}  # fmt: skip
_NAME = 28  # columns of a host's name
_FEW_HOSTS = 4  # whose hardware is shown at once; that of more hosts is to be unfolded
_NOT_TOLD = "-"
_TITLE = 18  # of a metric's
_NOTE = 60
_TRACEBACK_LINES = 80
_TRACEBACK_CHARS = 400  # of one line


def html(state: RunState, *, lines: int = OUTPUT_LINES) -> str:
    """Return the whole view of a run: head, alerts, table, curves, the last `lines` lines of output. Under 200 KB without pictures."""
    head, table = head_and_table(state)
    about, output = about_and_output(state, lines)
    table += all_ranks(state)
    parts = [
        style(),
        head,
        f'<div class="dm-scroll" tabindex="0">{table}</div>',
        curves(state),
        pictures(state),
    ]
    if output:
        parts += [about, f'<div class="dm-bottom" tabindex="0">{output}</div>']
    return f'<div class="distmagic">{"".join(parts)}</div>'


def announcement(text: str) -> str:
    """Return a few words as the head of a run that has not begun."""
    phase = f'<span class="dm-phase">{escape(text)}</span>'
    return f'<div class="distmagic">{style()}<div class="dm-head dm-connecting">{phase}</div></div>'


@cache
def style() -> str:
    """Return the style of all that this package writes."""
    text = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    return f"<style>{' '.join(text.split())}</style>"


def head_and_table(state: RunState) -> tuple[str, str]:
    """Return the two upper parts of the live view."""
    view = overview(state)
    hosts = _hardware(view) if len(view.hardware) <= _FEW_HOSTS else ""
    groups = [group for group in view.groups if not group.is_folded]
    return _head(view), _table_of(groups, view.metrics, state.variable) + hosts


def all_ranks(state: RunState) -> str:
    """Return every rank and the hardware of a large run, to be unfolded; "" where the table has a row a rank."""
    view = overview(state)
    if len(view.hardware) <= _FEW_HOSTS:
        return _folded(view, state.variable)
    shown = min(MAX_HOSTS, len(view.hardware))
    some = "" if shown == len(view.hardware) else f"{shown} of "
    title = f"hardware of {some}{len(view.hardware)} hosts"
    hosts = (
        f'<details class="dm-all"><summary>{title}</summary>{_hardware(view)}</details>'
    )
    return _folded(view, state.variable) + hosts


def about_and_output(state: RunState, lines: int) -> tuple[str, str]:
    """Return the two lower parts of the live view, "" and "" where nothing was written yet."""
    output = output_lines(state, lines)
    about = about_output(state, lines) if output else ""
    return about, output


def _head(view: Overview) -> str:
    parts = [f'<span class="dm-phase">{view.phase}</span>']
    if view.fraction is not None:
        parts.append(_bar(view.fraction))
        parts.append(f'<span class="dm-percent">{q.percent(view.fraction)}</span>')
    facts = escape(" · ".join(view.facts))
    parts.append(f"<span>{facts}</span>")
    if view.concern:
        parts.append(f'<span class="dm-tell dm-slow">{escape(view.concern)}</span>')
    tone = "dm-failed" if view.is_alarming else _phase_class(view.phase)
    line = f'<div class="dm-head {tone}">{" ".join(parts)}</div>'
    return line + _what(view) + "".join(_alert(alert) for alert in view.alerts)


def _what(view: Overview) -> str:
    """Return the line that says what is run, under which name, and since when."""
    parts = [f'job <b class="dm-job">{escape(view.job)}</b>', escape(view.since)]
    if view.call:
        parts.insert(0, f"<code>{escape(view.call)}</code>")
    words = " · ".join(part for part in parts if part)
    return f'<div class="dm-what">{words}</div>'


def _phase_class(phase: str) -> str:
    if phase == "last seen":
        return "dm-detached"
    return f"dm-{phase}" if phase.isalpha() else ""


def _bar(fraction: float) -> str:
    return f'<progress value="{fraction:.3f}" max="1"></progress>'


def _alert(alert: Alert) -> str:
    if not alert.detail.strip():
        inner = f'<span class="dm-text">{escape(alert.text)}</span>'
    else:
        lines = alert.detail.rstrip().splitlines()[-_TRACEBACK_LINES:]
        body = "\n".join(spans(line[:_TRACEBACK_CHARS]) for line in lines)
        inner = f"<details><summary>{escape(alert.text)}</summary><pre>{body}</pre></details>"
    return f'<div class="dm-alert dm-{alert.level}">{inner}</div>'


# ---- the table


def _folded(view: Overview, variable: str) -> str:
    """Return the rows that a click unfolds, "" for none."""
    html = ""
    for group in view.groups:
        if group.is_folded:
            inner = _table_of([replace(group, title="")], view.metrics, variable)
            html += f'<details class="dm-all"><summary>{escape(group.title)}</summary>{inner}</details>'
    return html


def _hardware(view: Overview) -> str:
    """Return a table of how busy each host is, "" where nothing has been told."""
    if not view.hardware:
        return ""
    lines = ["<tr><th>host</th><th>CPU</th><th>memory</th><th>network</th><th>GPUs</th></tr>"]  # fmt: skip
    for one in view.hardware[:MAX_HOSTS]:
        texts = (one.host, one.cpu, one.memory, one.network, one.gpus)
        cells = [f"<td>{escape(text) or _NOT_TOLD}</td>" for text in texts]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<table class="dm-table dm-hardware"><tbody>{"".join(lines)}</tbody></table>'
    )


def _table_of(
    groups: Sequence[Group], metric_names: Sequence[str], variable: str
) -> str:
    rows = [row for group in groups for row in group.rows]
    if not rows:
        return ""
    metrics = [
        name for name in metric_names if any(name in row.metrics for row in rows)
    ]
    columns = _columns(rows, metrics[:_MAX_METRICS], is_large=len(groups) > 1)
    titles = [
        f'<th class="{column.cls}">{escape(column.title)}</th>' for column in columns
    ]
    lines = [f"<tr>{''.join(titles)}</tr>"]
    index = 0
    for group in groups:
        if group.title:
            lines.append(
                f'<tr><th class="dm-title" colspan="{len(columns)}">{escape(group.title)}</th></tr>'
            )
        for row in group.rows:
            cells = "".join(column.cells[index] for column in columns)
            mark = " dm-awaited" if row.stands_out else ""
            lines.append(
                f'<tr class="{_phase_class(state_word(row))}{mark}">{cells}</tr>'
            )
            index += 1
    more = len(metrics) - _MAX_METRICS
    note = ""
    if more > 0:
        note = f'<div class="dm-faint">{_MAX_METRICS} of {len(metrics)} metrics shown; all of them: {variable}.metrics</div>'
    return f'<table class="dm-table"><tbody>{"".join(lines)}</tbody></table>{note}'


@dataclass(frozen=True, kw_only=True)
class _Column:
    """One column: the title as text, and the cells of all rows as HTML. `cls` is the title's class."""

    title: str
    cls: str
    cells: list[str]
    is_empty: bool = False


def _columns(
    rows: Sequence[Row], metrics: Sequence[str], *, is_large: bool
) -> list[_Column]:
    """Return the columns, without those that are empty in every row. A large run has no column of devices."""
    columns = [
        _column("rank", [_name(row) for row in rows], "dm-n", "dm-n"),
        _column("host", [escape(cut_middle(row.host, _NAME)) for row in rows]),
    ]
    if not is_large:
        columns.append(_column("device", [escape(row.device[:_NAME]) for row in rows]))
    gpus = [escape(row.gpu) for row in rows]
    if any(gpus):
        gpus = [text or _NOT_TOLD for text in gpus]
    columns += [
        _column("state", [_state(row) for row in rows], "", "dm-state"),
        _column("progress", [_progress(row) for row in rows]),
        _column("step", [escape(row.count) for row in rows], "dm-n", "dm-n"),
    ]
    for name in metrics:
        title = cut_middle(plain(name), _TITLE)
        cells = [_metric_cell(row.metrics.get(name)) for row in rows]
        columns.append(_Column(title=title, cls="dm-n", cells=cells))
    columns += [
        _column("rate", [escape(row.rate) for row in rows], "dm-n", "dm-n"),
        _column("left", [escape(row.left) for row in rows], "dm-n", "dm-n"),
        _column("GPU", gpus),
        _column(
            "note",
            [escape(cut(row.remarks, _NOTE)) for row in rows],
            "dm-note",
            "dm-note",
        ),
    ]
    return [column for column in columns if not column.is_empty]


def _column(
    title: str, texts: list[str], title_cls: str = "", cell_cls: str = ""
) -> _Column:
    cells = [_cell(text, cell_cls) for text in texts]
    return _Column(title=title, cls=title_cls, cells=cells, is_empty=not any(texts))


def _cell(html: str, cls: str = "") -> str:
    return f'<td class="{cls}">{html}</td>' if cls else f"<td>{html}</td>"


def _name(row: Row) -> str:
    if row.rank is None:
        return escape(row.name)
    return f'<b class="{palette(row.rank)}">{row.rank}</b>'


def _state(row: Row) -> str:
    """Return the word of the state. Its colour is in the cell, too: it stays where the style sheet is taken away."""
    word = state_word(row)
    colour = _STATE_COLOURS.get(word)
    return (
        f'<span style="color:{colour}">{escape(word)}</span>'
        if colour
        else escape(word)
    )


def _progress(row: Row) -> str:
    if row.fraction is None:
        return ""
    return f"{_bar(row.fraction)} {q.percent(row.fraction)}"


def _metric_cell(value: float | None) -> str:
    if value is None:
        return _cell("", "dm-n")
    return _cell(q.number(value), "dm-n" if math.isfinite(value) else "dm-n dm-bad")
