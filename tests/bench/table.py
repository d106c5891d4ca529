"""Rows as text, as JSON, and as tables of two pages: all rows for benchmarks.md, four of them for the README. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tests.bench.figures import (
    MetricRow,
    Section,
    Spread,
    Target,
    ratios,
    spread,
    verdict,
)

_LOAD = ", load before "  # between the machine and its load, in a section's `machine`
HEADS = ("what", "ours", "theirs", "compared with", "ratio", "target", "")
# The rows that the README has, as (what, against): what a user feels first, two of them lost.
HEADLINES = (
    ("first user line, cold", "ssh + torchrun by hand"),
    ("end of the cell, warm", "ssh + torchrun by hand"),
    ("end of the cell, warm", "accelerate"),
    ("1 GB to 4 hosts, 1 Gbit/s", "4 x scp in parallel"),
)


def figure(value: float) -> str:
    """Return a number with three digits that count, no exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return (
        f"{value:.1f}"
        if size >= 10
        else f"{value:.2f}"
        if size >= 1
        else f"{value:.2g}"
    )


def spread_text(found: Spread | None, unit: str) -> str:
    """Return `1.25 s (1.10..1.60)`."""
    if found is None:
        return "-"
    middle = f"{figure(found.median)}{f' {unit}' if unit not in ('', 'x') else unit}"
    same = figure(found.least) == figure(found.most)
    return middle if same else f"{middle} ({figure(found.least)}..{figure(found.most)})"


def target_text(target: Target | None, unit: str) -> str:
    """Return `<= 0.6x` or `<= 1 %`."""
    if target is None:
        return ""
    return (
        f"<= {figure(target.limit)}x"
        if target.of == "ratio"
        else f"<= {figure(target.limit)} {unit}".rstrip()
    )


def cells(row: MetricRow) -> tuple[str, ...]:
    """Return a row's cells, as under `HEADS`."""
    return (
        row.what,
        spread_text(spread(row.ours), row.unit),
        spread_text(spread(row.theirs), row.unit),
        row.against,
        spread_text(spread(ratios(row)), "x"),
        target_text(row.target, row.unit),
        verdict(row),
    )


def as_text(sections: Sequence[Section]) -> str:
    """Return all sections as tables of plain text, notes below each."""
    return "\n\n".join(map(_section_text, sections)) + "\n"


def _section_text(section: Section) -> str:
    lines = [HEADS, *map(cells, section.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADS))]
    drawn = [
        "  ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]
    head = f"{section.title} ({section.name}; {section.when}; {section.took_s:.0f} s; {section.machine})"
    return "\n".join((head, *drawn, *(f"  * {note}" for note in notes(section.rows))))


def notes(rows: Sequence[MetricRow]) -> list[str]:
    """Return the notes of rows, each once, with the rows that they belong to."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            found.setdefault(row.note, []).append(
                f"{row.what}{f' / {row.against}' if row.against else ''}"
            )
    return [
        f"{' | '.join(whats) if len(whats) < 3 else f'{len(whats)} rows'}: {note}"
        for note, whats in found.items()
    ]


def as_markdown(sections: Sequence[Section]) -> str:
    """Return one table for benchmarks.md, all sections' rows below each other, the notes after it."""
    lines = [f"| {' | '.join(HEADS[:-1])} | |", "|---" * len(HEADS) + "|"]
    lines += [
        f"| {' | '.join(map(_escaped, cells(row)))} |"
        for section in sections
        for row in section.rows
    ]
    machines = list(
        dict.fromkeys(section.machine.partition(_LOAD)[0] for section in sections)
    )
    loads = [
        load for section in sections if (load := section.machine.partition(_LOAD)[2])
    ]
    load = f"; load before each section {', '.join(loads)}" if loads else ""
    said = [
        f"- {_escaped(note)}" for section in sections for note in notes(section.rows)
    ]
    when = f"Measured by `make bench` on {' and on '.join(machines)}{load}; median (least..most) of all rounds, in turn."
    return "\n".join([when, "", *lines, *(["", *said] if said else [])])


def headlines(sections: Sequence[Section]) -> str:
    """Return the table of `HEADLINES` for the README: medians only. Raises ValueError for one that was not measured."""
    rows = {
        (row.what, row.against): row for section in sections for row in section.rows
    }
    lines = ["| what | ours | theirs | compared with |", "|---|---|---|---|"]
    for wanted in HEADLINES:
        if wanted not in rows:
            raise ValueError(
                f"README.md needs the row {' / '.join(wanted)}, which was not measured: run make bench"
            )
        what, ours, theirs, against, *_ = cells(rows[wanted])
        medians = [text.partition(" (")[0] for text in (ours, theirs)]
        lines.append(f"| {' | '.join(map(_escaped, (what, *medians, against)))} |")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def into_page(page: str, markdown: str, name: str = "bench") -> str:
    """Return the page with `markdown` between the two marks of this name. Raises ValueError where it has none."""
    first, last = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"the page has no {first} followed by {last}")
    return f"{before}{first}\n{markdown}\n{last}{after}"


def as_json(sections: Sequence[Section]) -> str:
    """Return every figure, with what follows from them."""
    return json.dumps([_plain(section) for section in sections], indent=1) + "\n"


def _plain(section: Section) -> dict[str, Any]:
    rows = [
        {**asdict(row), "ratio": list(ratios(row)), "verdict": verdict(row)}
        for row in section.rows
    ]
    return {**asdict(section), "rows": rows}


def from_json(text: str) -> tuple[Section, ...]:
    """Return what `as_json` has written."""
    return tuple(_section(raw) for raw in json.loads(text))


def _section(raw: dict[str, Any]) -> Section:
    return Section(**{**raw, "rows": tuple(map(_row, raw["rows"]))})


def _row(raw: dict[str, Any]) -> MetricRow:
    own = {
        name: value for name, value in raw.items() if name not in ("ratio", "verdict")
    }
    target = None if own["target"] is None else Target(**own["target"])
    return MetricRow(
        **{
            **own,
            "ours": tuple(own["ours"]),
            "theirs": tuple(own["theirs"]),
            "target": target,
        }
    )
