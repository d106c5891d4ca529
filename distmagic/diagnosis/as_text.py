"""A report of the doctor as text. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distmagic.diagnosis.finding import Diagnosis, Finding, Line
from distmagic.render import quantities as q
from distmagic.render.table import Column, text_lines
from distmagic.render.text_width import cut_middle, plain

_CELL = 26  # columns


def text(report: Diagnosis) -> str:
    """Return everything: what was checked, the table, and the findings with their cures."""
    parts = [headline(report)]
    for title, table in tables(report):
        parts.append("\n".join([f"{title}:", *text_lines(columns(report, table))]))
    if report.findings:
        parts.append(in_words(report.findings))
    return "\n\n".join(parts)


def in_words(findings: Sequence[Finding]) -> str:
    """Return the findings, each with its hosts, the evidence, and its cure below; "" for none."""
    lines = []
    for finding, hosts in together(findings).items():
        lines.append(f"{finding.level}: {', '.join(hosts)}: {finding.evidence}")
        lines += [f"  {line}" for line in finding.cure.splitlines()]
    return "\n".join(map(plain, lines))


def tables(report: Diagnosis) -> list[tuple[str, Sequence[Line]]]:
    """Return the non-empty tables, each with its title."""
    every = (
        (
            "Values of each host (*: see the finding below, -: none or unknown)",
            report.table,
        ),
        ("Connections from the row's host to the column's host", report.square),
        ("Bandwidth and latency of pairs", report.speeds),
    )
    return [(title, table) for title, table in every if table]


def headline(report: Diagnosis) -> str:
    """Return the number of checked hosts, and of errors and warnings."""
    counts = Counter(one.level for one in report.findings)
    parts = [q.plural(count, level) for level, count in sorted(counts.items())]
    what = ", ".join(parts) or "nothing is wrong"
    line = f"{q.plural(len(report.hosts), 'host')}: {what} ({report.took_s:.1f} s)"
    alike = "; ".join(plain(one) for one in report.alike)
    return f"{line}\nNo difference found: {alike}" if alike else line


def columns(report: Diagnosis, table: Sequence[Line]) -> list[Column]:
    """Return the columns of a table of the report; odd cells have a star."""
    found = [Column(title="", cells=[plain(line.title) for line in table])]
    for host in report.hosts:
        cells = [cut_middle(plain(line.cells.get(host) or "-"), _CELL) for line in table]  # fmt: skip
        odd = frozenset(row for row, line in enumerate(table) if host in line.odd)
        found.append(Column(title=plain(host), cells=cells, best=odd))
    return found


def together(findings: Sequence[Finding]) -> Mapping[Finding, list[str]]:
    """Return findings with their hosts; those that only differ in the host are merged."""
    hosts: dict[Finding, list[str]] = {}
    for one in findings:
        hosts.setdefault(replace(one, host="", check=""), []).append(one.host)
    return hosts
