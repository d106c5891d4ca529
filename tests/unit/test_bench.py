"""The bench: its README rows, and that its sections can be run at all. What they measure is no test's business."""

from __future__ import annotations

import importlib

import pytest

from tests import REPOSITORY
from tests.bench import table
from tests.bench.__main__ import SECTIONS
from tests.bench.figures import MetricRow, Section, Target

ROW = MetricRow(
    what="start",
    unit="s",
    ours=(1.0, 2.0, 6.0),
    against="by hand",
    theirs=(4.0, 4.0, 8.0),
    target=Target(limit=0.6),
)


def section(*rows: MetricRow) -> Section:
    return Section(
        name="start",
        title="Starting",
        rows=rows,
        when="2026-01-02 03:04",
        took_s=61.5,
        machine="2 cores",
    )


def test_every_file_of_the_bench_can_be_imported():
    """They are run by hand only; a name that was moved would be noticed late."""
    for file in (REPOSITORY / "tests" / "bench").glob("*.py"):
        if file.stem != "__main__":
            module = importlib.import_module(f"tests.bench.{file.stem}")
            assert file.stem not in SECTIONS or (
                callable(module.measure) and module.TITLE
            )


def test_the_readme_gets_four_rows_with_their_medians():
    rows = [
        MetricRow(what=what, unit="s", ours=(1.0, 2.0, 6.0), against=against)
        for what, against in table.HEADLINES
    ]
    lines = table.headlines([section(ROW, *rows)]).splitlines()
    assert len(lines) == 2 + 4
    assert lines[2] == "| first user line, cold | 2.00 s | - | ssh + torchrun by hand |"
    with pytest.raises(ValueError, match="the row first user line, cold / ssh"):
        table.headlines([section(*rows[1:])])
