"""A report of the doctor as HTML. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from distmagic.diagnosis.as_text import headline, rows, tables, together
from distmagic.diagnosis.finding import Diagnosis
from distmagic.render import style


def html(report: Diagnosis) -> str:
    """Return everything: what was checked, the table, and the findings with their cures."""
    first, _, alike = headline(report).partition("\n")
    parts = [style(), f'<div class="dm-head"><span>{escape(first)}</span></div>']
    if alike:
        parts.append(f'<div class="dm-faint">{escape(alike)}</div>')
    for title, table in tables(report):
        parts.append(f"<div>{escape(title)}</div>{_table(rows(report, table))}")
    for finding, hosts in together(report.findings).items():
        kind = "dm-alert dm-error" if finding.level == "error" else "dm-alert"
        cure = f"<pre>{escape(finding.cure)}</pre>" if finding.cure else ""
        names = escape(", ".join(hosts))
        parts.append(
            f'<div class="{kind}"><b>{finding.level}: {names}</b> {escape(finding.evidence)}{cure}</div>'
        )
    return f'<div class="distmagic">{"".join(parts)}</div>'


def _table(table: Sequence[Sequence[str]]) -> str:
    lines = []
    for number, row in enumerate(table):
        tag = "td" if number else "th"
        cells = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    shown = f'<table class="dm-table"><tbody>{"".join(lines)}</tbody></table>'
    return f'<div class="dm-scroll" tabindex="0">{shown}</div>'
