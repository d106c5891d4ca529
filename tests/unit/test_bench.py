"""The bench: figures, tables, the README, and that its sections can be run at all. What they measure is no test's business."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from tests import REPOSITORY
from tests.bench import many, table
from tests.bench.__main__ import SECTIONS
from tests.bench.bench import Bench
from tests.bench.figures import (
    MetricRow,
    Section,
    Spread,
    Target,
    judged,
    ratios,
    spread,
    verdict,
)
from tests.bench.peers import Peers

ROW = MetricRow(
    what="start",
    unit="s",
    ours=(1.0, 2.0, 6.0),
    against="by hand",
    theirs=(4.0, 4.0, 8.0),
    target=Target(limit=0.6),
)
ALONE = MetricRow(
    what="loading", unit="ms", ours=(40.0,), target=Target(limit=100, of="ours")
)
MISSING = MetricRow(
    what="a | b",
    unit="s",
    ours=(1.0,),
    against="tool",
    target=Target(limit=1),
    note="can't be <installed>",
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


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_can_be_begun(name):
    """It imports what is there: a section is run far less often than what it measures is changed."""
    module = importlib.import_module(f"tests.bench.{name}")
    assert callable(module.measure)
    assert module.TITLE


def test_the_many_hosts_that_are_played_answer_all_that_a_launch_asks(tmp_path):
    bench = Bench(peers=Peers(python=tmp_path, missing={}), rounds=1, rounds_dear=1)
    with many.simulated_hosts(tmp_path / "hosts", log_in_s=0.0, answer_s=0.0) as path:
        [took] = many.launches(bench, path, 3)
    assert took.threads > 0
    assert took.stopped_s > 0


def test_spread_is_median_least_and_most():
    assert spread((3.0, 1.0, 2.0)) == Spread(median=2.0, least=1.0, most=3.0)
    assert spread(()) is None


def test_ratios_pair_the_rounds():
    assert ratios(ROW) == (0.25, 0.5, 0.75)


def test_ratios_of_unequal_rounds_are_by_their_median():
    assert ratios(
        MetricRow(what="", unit="s", ours=(1.0, 2.0), theirs=(1.0, 4.0, 5.0))
    ) == (0.25, 0.5)


def test_no_ratio_without_both():
    assert ratios(ALONE) == ()
    assert ratios(MetricRow(what="", unit="s", ours=(), theirs=(1.0,))) == ()


def test_a_ratio_to_nothing_is_infinite():
    assert ratios(MetricRow(what="", unit="s", ours=(1.0,), theirs=(0.0,))) == (
        float("inf"),
    )


@pytest.mark.parametrize(
    ("row", "word"),
    [
        (ROW, "met"),
        (
            MetricRow(
                what="", unit="s", ours=(3.0,), theirs=(4.0,), target=Target(limit=0.6)
            ),
            "missed",
        ),
        (
            MetricRow(
                what="", unit="s", ours=(0.6,), theirs=(1.0,), target=Target(limit=0.6)
            ),
            "met",
        ),
        (ALONE, "met"),
        (
            MetricRow(
                what="", unit="ms", ours=(101.0,), target=Target(limit=100, of="ours")
            ),
            "missed",
        ),
        (MISSING, "not measured"),
        (MetricRow(what="", unit="ms", ours=(1.0,)), ""),
    ],
)
def test_verdict(row, word):
    assert verdict(row) == word


def test_the_median_decides_not_the_worst_round():
    assert judged(ROW) == Spread(median=0.5, least=0.25, most=0.75)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.0123, "0.012"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (1234.5, "1,234"),
        (float("inf"), "inf"),
        (0.08, "0.08"),
    ],
)
def test_figures_have_the_digits_that_count(value, text):
    assert table.figure(value) == text


def test_cells():
    assert table.cells(ROW) == (
        "start", "2.00 s (1.00..6.00)", "4.00 s (4.00..8.00)", "by hand", "0.5x (0.25..0.75)", "<= 0.6x", "met",
    )  # fmt: skip
    assert table.cells(ALONE) == (
        "loading",
        "40.0 ms",
        "-",
        "",
        "-",
        "<= 100 ms",
        "met",
    )


def test_text_has_columns_and_notes():
    lines = table.as_text([section(ALONE, MISSING)]).splitlines()
    assert lines[0] == "Starting (start; 2026-01-02 03:04; 62 s; 2 cores)"
    assert (
        lines[2].index("40.0 ms") == lines[1].index("ours") == lines[3].index("1.00 s")
    )
    assert lines[4] == "  * a | b / tool: can't be <installed>"


def test_a_note_of_many_rows_is_said_once():
    assert table.notes([MISSING] * 3) == ["3 rows: can't be <installed>"]


def test_markdown_escapes_what_would_break_the_table():
    text = table.as_markdown([section(MISSING)])
    assert "| a \\| b |" in text
    assert "&lt;installed>" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1


def test_json_keeps_all_figures():
    sections = (section(ROW, ALONE, MISSING),)
    assert table.from_json(table.as_json(sections)) == sections
    assert '"verdict": "met"' in table.as_json(sections)


def test_a_page_gets_the_table_between_its_marks_again_and_again():
    page = f"# head\n{table.BEGIN}\nold\n{table.END}\nend\n"
    once = table.into_page(page, "new")
    assert once == f"# head\n{table.BEGIN}\nnew\n{table.END}\nend\n"
    assert table.into_page(once, "new") == once


@pytest.mark.parametrize(
    "page", ["nothing", f"{table.BEGIN}", f"{table.END} {table.BEGIN}"]
)
def test_a_page_without_the_marks_is_left_alone(page):
    with pytest.raises(ValueError, match=r"the page has no"):
        table.into_page(page, "new")


def test_the_readme_gets_ten_rows_with_their_medians():
    rows = [
        MetricRow(what=what, unit="s", ours=(1.0, 2.0, 6.0), against=against)
        for what, against in table.HEADLINES
    ]
    lines = table.headlines([section(ROW, *rows)]).splitlines()
    assert len(lines) == 2 + 10
    assert lines[2] == "| first user line, cold | 2.00 s | - | ssh + torchrun by hand |"
    with pytest.raises(ValueError, match="the row first user line, cold / ssh"):
        table.headlines([section(*rows[1:])])


def test_machines_are_said_once_and_their_loads_after_them():
    twice = [
        replace(section(ROW), machine=f"2 cores, load before {load}")
        for load in (0.9, 1.5)
    ]
    said = table.as_markdown(twice).splitlines()[0]
    assert said.startswith(
        "Measured by `make bench` on 2 cores; load before each section 0.9, 1.5; median"
    )


# The sections run by hand only; a name that was moved would be noticed late.
SECTION_FILES = sorted(
    file.stem
    for file in (REPOSITORY / "tests" / "bench").glob("*.py")
    if file.stem != "__main__"
)


@pytest.mark.parametrize("name", SECTION_FILES)
def test_every_file_of_the_bench_can_be_imported(name):
    importlib.import_module(f"tests.bench.{name}")
