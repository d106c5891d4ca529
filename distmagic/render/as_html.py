"""A run as self-contained HTML for light and dark pages: no script, no widget, no external file.

The styles are in style.css, which every page includes. In an untrusted notebook, which removes
styles and drawings, the table stays readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path

from distmagic.render import quantities as q
from distmagic.render.curves import curves, palette
from distmagic.render.output import about_output, output_lines, pictures
from distmagic.render.overview import Alert, Overview, overview
from distmagic.render.rows import (
    MAX_HOSTS,
    MAX_METRICS,
    NOT_TOLD,
    Group,
    Row,
    columns,
    state_word,
    under_titles,
)
from distmagic.render.table import NUMBER, Column, html_lines, html_table
from distmagic.render.text_width import cut, one_line, plain, spans
from distmagic.state.model import RunState

_STATE_COLOURS = {
    "running": "#2f7fd6", "done": "#2f9e57", "failed": "#d9453d", "lost": "#d9453d",
    "slow": "#d98a1e", "stalled": "#d98a1e", "reconnecting": "#d98a1e",
}  # fmt: skip
_FEW_HOSTS = 4  # their hardware is shown at once; that of more hosts is collapsed
_NOTE = 60
_TRACEBACK_LINES = 80
_TRACEBACK_CHARS = 400  # characters of one line


def html(state: RunState) -> str:
    """Return the whole view of a run: head, alerts, table, curves, the last lines of output.

    Under 200 KB without pictures.
    """
    head, table = head_and_table(state)
    table += all_ranks(state)
    parts = [
        style(),
        head,
        f'<div class="dm-scroll" tabindex="0">{table}</div>',
        curves(state),
        pictures(state),
    ]
    output = output_lines(state)
    if output:
        parts.append(about_output(state))
        parts.append(f'<div class="dm-bottom" tabindex="0">{output}</div>')
    return f'<div class="distmagic">{"".join(parts)}</div>'


def announcement(text: str) -> str:
    """Return the HTML of a run that has not started: only a head, with a short text."""
    phase = f'<span class="dm-phase">{escape(text)}</span>'
    return f'<div class="distmagic">{style()}<div class="dm-head dm-connecting">{phase}</div></div>'


@cache
def style() -> str:
    """Return the `<style>` element for all HTML of this package."""
    text = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    return f"<style>{' '.join(text.split())}</style>"


def head_and_table(state: RunState) -> tuple[str, str]:
    """Return the two upper parts of the live view."""
    view = overview(state)
    loads = _loads(state)
    hosts = _hardware(loads) if len(loads) <= _FEW_HOSTS else ""
    groups = [group for group in view.groups if not group.is_folded]
    return _head(state, view), _table_of(groups, view.metrics, state.variable) + hosts


def all_ranks(state: RunState) -> str:
    """Return every rank and the hardware of a large run, collapsed; "" if the table has one row for
    each rank.
    """
    folded = _folded(overview(state), state.variable)
    loads = _loads(state)
    if len(loads) <= _FEW_HOSTS:
        return folded
    some = f"{MAX_HOSTS} of " if len(loads) > MAX_HOSTS else ""
    title = f"hardware of {some}{len(loads)} hosts"
    hosts = _hardware(loads)
    return (
        f'{folded}<details class="dm-all"><summary>{title}</summary>{hosts}</details>'
    )


def _head(state: RunState, view: Overview) -> str:
    parts = [f'<span class="dm-phase">{view.phase}</span>']
    if view.fraction is not None:
        parts.append(_bar(view.fraction))
        parts.append(f'<span class="dm-percent">{q.percent(view.fraction)}</span>')
    facts = escape(" · ".join(view.facts))
    parts.append(f"<span>{facts}</span>")
    if view.concern:
        parts.append(f'<span class="dm-tell dm-slow">{escape(view.concern)}</span>')
    is_alarming = any(alert.level == "error" for alert in view.alerts)
    tone = "dm-failed" if is_alarming else _phase_class(view.phase)
    line = f'<div class="dm-head {tone}">{" ".join(parts)}</div>'
    # The line with the call, the name and the start time of a run.
    parts = [f'job <b class="dm-job">{escape(plain(state.job))}</b>']
    if state.terms.call:
        parts.insert(0, f"<code>{escape(one_line(state.terms.call))}</code>")
    if state.began_unix_s:
        now_s = state.began_unix_s + state.before_s + state.at_s
        parts.append(f"since {q.moment(state.began_unix_s, now_s)}")
    line += f'<div class="dm-what">{" · ".join(parts)}</div>'
    return line + "".join(map(alert_html, view.alerts))


def _phase_class(phase: str) -> str:
    if phase == "last seen":
        return "dm-detached"
    return f"dm-{phase}" if phase.isalpha() else ""


def _bar(fraction: float) -> str:
    return f'<progress value="{fraction:.3f}" max="1"></progress>'


def alert_html(alert: Alert, *, is_open: bool = False) -> str:
    """Return an alert; a click expands its detail."""
    if not alert.detail.strip():
        inner = f'<span class="dm-text">{escape(alert.text)}</span>'
    else:
        lines = alert.detail.rstrip().splitlines()[-_TRACEBACK_LINES:]
        body = "\n".join(spans(line[:_TRACEBACK_CHARS]) for line in lines)
        is_unfolded = " open" if is_open else ""
        inner = f"<details{is_unfolded}><summary>{escape(alert.text)}</summary><pre>{body}</pre></details>"
    return f'<div class="dm-alert dm-{alert.level}">{inner}</div>'


# ---- the table


def _folded(view: Overview, variable: str) -> str:
    """Return the rows that a click expands, "" for none."""
    html = ""
    for group in view.groups:
        if group.is_folded:
            inner = _table_of([replace(group, title="")], view.metrics, variable)
            html += f'<details class="dm-all"><summary>{escape(group.title)}</summary>{inner}</details>'
    return html


def _loads(state: RunState) -> list[tuple[str, ...]]:
    """Return host, CPU, memory, network and GPUs of each host of a running run."""
    rows: list[tuple[str, ...]] = []
    for node in () if state.is_over else state.nodes:
        load = node.hardware
        if load is None or node.phase == "gone" or node.broken:
            continue
        network = cpu = NOT_TOLD
        if load.received_bytes_s is not None and load.sent_bytes_s is not None:
            network = f"{q.per_second(load.received_bytes_s)} in, {q.per_second(load.sent_bytes_s)} out"
        if load.cpu_utilization is not None:
            cpu = q.percent(load.cpu_utilization)
        memory = q.used(load.used_bytes, load.total_bytes)
        gpus = q.gpus(load.gpus) or NOT_TOLD
        rows.append((plain(node.host), cpu, memory, network, gpus))
    return rows


def _hardware(loads: Sequence[Sequence[str]]) -> str:
    """Return a table with the load of each host, "" without measurements."""
    if not loads:
        return ""
    shown = loads[:MAX_HOSTS]
    rows = [("host", "CPU", "memory", "network", "GPUs"), *shown]
    columns = [Column(title, cells) for title, *cells in zip(*rows, strict=True)]
    lines = html_lines(
        columns, [""] * len(shown), lambda one, row: escape(one.cells[row])
    )
    return html_table(lines, " dm-hardware")


def _table_of(
    groups: Sequence[Group], metric_names: Sequence[str], variable: str
) -> str:
    rows = [row for group in groups for row in group.rows]
    if not rows:
        return ""
    metrics = [
        name for name in metric_names if any(name in row.metrics for row in rows)
    ]
    shown = columns(groups, metrics)
    classes = []
    for row in rows:
        mark = " dm-awaited" if row.stands_out else ""
        classes.append(f"{_phase_class(state_word(row))}{mark}")

    def title(text: str) -> str:
        return (
            f'<tr><th class="dm-title" colspan="{len(shown)}">{escape(text)}</th></tr>'
        )

    lines = html_lines(shown, classes, lambda one, row: _cell(one, row, rows[row]))
    table = html_table(under_titles(groups, lines, title))
    if len(metrics) <= MAX_METRICS:
        return table
    return f'{table}<div class="dm-faint">{MAX_METRICS} of {len(metrics)} metrics shown; all of them: {variable}.metrics</div>'


def _cell(column: Column, index: int, row: Row) -> str:
    """Return the HTML of one cell.

    The colour of a state is an attribute of the cell, so it remains without the style sheet.
    """
    text = column.cells[index]
    html = escape(cut(text, _NOTE))
    if column.key == "rank" and row.rank is not None:
        return f'<b class="{palette(row.rank)}">{html}</b>'
    if column.key == "state" and text in _STATE_COLOURS:
        return f'<span style="color:{_STATE_COLOURS[text]}">{html}</span>'
    if column.key == "progress" and row.fraction is not None:
        return f"{_bar(row.fraction)} {q.percent(row.fraction)}"
    if column.kind == NUMBER and text in ("NaN", "inf", "-inf"):
        return f'<span class="dm-bad">{html}</span>'
    return html
