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


# They are run by hand only; a name that was moved would be noticed late.
FILES = sorted(file.stem for file in (REPOSITORY / "tests" / "bench").glob("*.py"))


@pytest.mark.parametrize("name", [name for name in FILES if name != "__main__"])
def test_every_file_of_the_bench_can_be_imported(name):
    module = importlib.import_module(f"tests.bench.{name}")
    assert name not in SECTIONS or (callable(module.measure) and module.TITLE)


def test_the_many_hosts_that_are_played_answer_all_that_a_launch_asks(tmp_path):
    bench = Bench(peers=Peers(python=tmp_path, missing={}), rounds=1, rounds_dear=1)
    with many.simulated_hosts(tmp_path / "hosts", log_in_s=0.0, answer_s=0.0) as path:
        [took] = many.launches(bench, path, 3)
    assert took.threads > 0
    assert took.stopped_s > 0


def test_ratios_pair_the_rounds_and_the_median_decides():
    assert ratios(ROW) == (0.25, 0.5, 0.75)
    assert judged(ROW) == Spread(median=0.5, least=0.25, most=0.75)
    uneven = MetricRow(what="", unit="s", ours=(1.0, 2.0), theirs=(1.0, 4.0, 5.0))
    assert ratios(uneven) == (0.25, 0.5), "by their median"
    assert ratios(ALONE) == ratios(replace(ROW, ours=())) == ()
    assert ratios(replace(ROW, ours=(1.0,), theirs=(0.0,))) == (float("inf"),)


@pytest.mark.parametrize(
    ("row", "word"),
    [
        (ROW, "met"),
        (replace(ROW, ours=(3.0,), theirs=(4.0,)), "missed"),
        (replace(ROW, ours=(0.6,), theirs=(1.0,)), "met"),
        (ALONE, "met"),
        (replace(ALONE, ours=(101.0,)), "missed"),
        (MISSING, "not measured"),
        (replace(ALONE, target=None), ""),
    ],
)
def test_verdict(row, word):
    assert verdict(row) == word


def test_text_has_columns_digits_that_count_and_notes():
    lines = table.as_text([section(ROW, ALONE, MISSING, MISSING)]).splitlines()
    assert lines[0] == "Starting (start; 2026-01-02 03:04; 62 s; 2 cores)"
    assert lines[1].index("ours") == lines[3].index("40.0 ms")
    assert lines[2].split("  ")[0] == "start"
    for cell in ("2.00 s (1.00..6.00)", "0.5x (0.25..0.75)", "<= 0.6x", "met"):
        assert cell in lines[2]
    assert lines[-1].count("can't be <installed>") == 1, "said once"
    digits = {0.0: "0", 0.0123: "0.012", 1.234: "1.23", 1234.5: "1,234"}
    assert {value: table.figure(value) for value in digits} == digits


def test_markdown_escapes_what_would_break_the_table():
    text = table.as_markdown([section(MISSING)])
    assert "| a \\| b |" in text
    assert "&lt;installed>" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1


def test_json_keeps_all_figures():
    sections = (section(ROW, ALONE, MISSING),)
    assert table.from_json(table.as_json(sections)) == sections


def test_a_page_gets_the_table_between_its_marks_again_and_again():
    page = f"# head\n{table.BEGIN}\nold\n{table.END}\nend\n"
    once = table.into_page(page, "new")
    assert once == f"# head\n{table.BEGIN}\nnew\n{table.END}\nend\n"
    assert table.into_page(once, "newer") == once.replace("new", "newer")
    for unmarked in ("nothing", table.BEGIN, f"{table.END} {table.BEGIN}"):
        with pytest.raises(ValueError, match=r"the page has no"):
            table.into_page(unmarked, "new")


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
