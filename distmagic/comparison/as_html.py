"""Several runs as self-contained HTML: the table, and one chart for each metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from distmagic.comparison.as_text import columns, names_of_metrics, note
from distmagic.comparison.summary import RunSummary
from distmagic.render import quantities as q
from distmagic.render import style
from distmagic.render.curves import Curve, figure, palette, sparkline
from distmagic.render.table import Column, html_lines, html_table
from distmagic.render.text_width import cut_middle, plain

_MAX_CURVES = 8


def html(runs: Sequence[RunSummary], trainings: Sequence[Sequence[int]]) -> str:
    """Return the table, and one chart for each metric with a line for each run.

    Each group in `trainings` gets its own charts.
    """
    head = f'<div class="dm-head"><span>{q.plural(len(runs), "run")}</span></div>'
    parts = [style(), head]
    if runs:
        shown = columns(runs, trainings)

        def cell(column: Column, row: int) -> str:
            text = escape(column.cells[row])
            if column is shown[0]:
                return f'<b class="{palette(row)}">{text}</b>'
            if row in column.best:
                return f'<b>{text}</b><span class="dm-star"> *</span>'
            return text

        lines = html_lines(shown, [f"dm-{run.phase}" for run in runs], cell)
        below = "".join(f'<div class="dm-faint">{line}</div>' for line in note(runs))
        table = html_table(lines) + below
        parts.append(f'<div class="dm-scroll" tabindex="0">{table}</div>')
    for rows in trainings:
        parts.append(_curves({row: runs[row] for row in rows}))
    return f'<div class="distmagic">{"".join(parts)}</div>'


def _curves(runs: Mapping[int, RunSummary]) -> str:
    """Return the charts of some runs, keyed by their row in the table."""
    figures = []
    for name in names_of_metrics(list(runs.values())):
        all_of_name = {row: run.metrics.get(name) for row, run in runs.items()}
        found = {
            row: one for row, one in all_of_name.items() if one and len(one.bins) > 1
        }
        if found:
            # Curves of one metric, keyed by row. If only some runs count steps, only these are
            # drawn.
            by_step = any(metric.by_step for metric in found.values())
            drawn = {row: one for row, one in found.items() if one.by_step == by_step}
            curve = Curve(name=name, lines=drawn, by_step=by_step)
            caption = f"<b>{escape(cut_middle(plain(name), 40))}</b>"
            sparks = [
                f"{escape(runs[row].label)} {sparkline(metric)}"
                for row, metric in drawn.items()
            ]
            names = {row: runs[row].label for row in drawn}
            figures.append(
                figure(curve, caption, "<br>".join(sparks), names, most_lines=len(runs))
            )
    if not figures:
        return ""
    legend = [
        f'<b class="{palette(row)}">{escape(run.label)}</b>'
        for row, run in runs.items()
    ]
    shown = "".join(figures[:_MAX_CURVES])
    return f'<div class="dm-curves">{shown}</div><div class="dm-legend">{" ".join(legend)}</div>'
