"""A report of the doctor as HTML. Pure."""

from __future__ import annotations

from html import escape

from distmagic.diagnosis.as_text import columns, headline, tables, together
from distmagic.diagnosis.finding import Diagnosis
from distmagic.render import style
from distmagic.render.table import Column, html_lines, html_table


def html(report: Diagnosis) -> str:
    """Return everything: what was checked, the table, and the findings with their cures."""
    first, _, alike = headline(report).partition("\n")
    parts = [style(), f'<div class="dm-head"><span>{escape(first)}</span></div>']
    if alike:
        parts.append(f'<div class="dm-faint">{escape(alike)}</div>')
    for title, table in tables(report):
        classes = [""] * len(table)
        shown = html_table(html_lines(columns(report, table), classes, _cell))
        parts.append(f"<div>{escape(title)}</div>")
        parts.append(f'<div class="dm-scroll" tabindex="0">{shown}</div>')
    for finding, hosts in together(report.findings).items():
        kind = "dm-alert dm-error" if finding.level == "error" else "dm-alert"
        cure = f"<pre>{escape(finding.cure)}</pre>" if finding.cure else ""
        names = escape(", ".join(hosts))
        parts.append(
            f'<div class="{kind}"><b>{finding.level}: {names}</b> {escape(finding.evidence)}{cure}</div>'
        )
    return f'<div class="distmagic">{"".join(parts)}</div>'


def _cell(column: Column, row: int) -> str:
    return escape(column.texts[row + 1])
