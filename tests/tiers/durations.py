"""Put a whole run's measured durations into CONTRIBUTING: `python -m tests.tiers.durations REPORT.xml`."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests import REPOSITORY

PAGE = REPOSITORY / "CONTRIBUTING.md"
MARKS = ("<!-- durations: begin -->", "<!-- durations: end -->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """One test of a run: its folder, how long it took with its fixtures, and whether `make test` has it."""

    folder: str
    seconds: float
    is_quick: bool


def read(report: Path) -> list[Test]:
    """Return the tests of a JUnit file that pytest has written. The property `tier` comes from tests/conftest.py."""
    tests = []
    for case in ET.parse(report).iter("testcase"):  # our own file
        parts = case.attrib["classname"].split(".")
        tiers = [one.attrib["value"] for one in case.iter("property")]
        is_in_subfolder = parts[1] == "unit" and not parts[2].startswith("test_")
        folder = "/".join(parts[:3] if is_in_subfolder else parts[:2])
        test = Test(
            folder=folder, seconds=float(case.attrib["time"]), is_quick="quick" in tiers
        )
        tests.append(test)
    return tests


def table(tests: list[Test]) -> str:
    """Return a Markdown table: tests and seconds per folder, in `make test` and in all; seconds are added up over workers."""
    counts: Counter[tuple[str, bool]] = Counter()
    seconds: Counter[tuple[str, bool]] = Counter()
    for test in tests:
        for folder in (test.folder, "all"):
            counts[folder, test.is_quick] += 1
            seconds[folder, test.is_quick] += test.seconds
    lines = [
        "| folder | `make test`: tests | seconds | `make test-all`: tests | seconds |",
        "|---|---|---|---|---|",
    ]
    for folder in [*sorted({test.folder for test in tests}), "all"]:
        quick, whole = (folder, True), (folder, False)
        row = (
            f"`{folder}/`" if folder != "all" else "all",
            f"{counts[quick]:,}",
            f"{seconds[quick]:,.0f}",
            f"{counts[quick] + counts[whole]:,}",
            f"{seconds[quick] + seconds[whole]:,.0f}",
        )
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def replace(page: str, new: str) -> str:
    """Return the page with the table between its two marks replaced."""
    begin, end = (re.escape(mark) for mark in MARKS)
    text, count = re.subn(
        f"{begin}.*{end}",
        lambda _: f"{MARKS[0]}\n{new}\n{MARKS[1]}",
        page,
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"the page has {count} places for the table, not one")
    return text


if __name__ == "__main__":
    PAGE.write_text(replace(PAGE.read_text(), table(read(Path(sys.argv[1])))))
