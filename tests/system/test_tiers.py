"""Which tests `make test` has, and the table of their durations."""

from __future__ import annotations

import pytest

from tests.tiers import durations, sort_into_tier

REPORT = """<testsuites><testsuite>
<testcase classname="{0}.unit.state.of_folds" name="a" time="1.4">
<properties><property name="tier" value="quick"/></properties></testcase>
<testcase classname="{0}.e2e.of_runs" name="b" time="20.2"/>
<testcase classname="{0}.e2e.of_runs" name="c" time="1000"/>
</testsuite></testsuites>"""


def test_durations_are_added_up_for_each_folder(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format("tests"))
    rows = durations.table(durations.read(report)).splitlines()[2:]
    assert rows == [
        "| `tests/e2e/` | 0 | 0 | 2 | 1,020 |",
        "| `tests/unit/state/` | 1 | 1 | 1 | 1 |",
        "| all | 1 | 1 | 3 | 1,022 |",
    ]


def test_the_page_has_one_place_for_the_table():
    page = durations.PAGE.read_text()
    assert "| new |" in durations.replace(page, "| new |")
    with pytest.raises(ValueError, match="0 places"):
        durations.replace("", "| new |")


class Item:
    """A test as pytest has collected it, with these marks."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid = nodeid
        self.marks = [mark.mark for mark in marks]
        self.user_properties: list[tuple[str, object]] = []

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark for mark in self.marks if mark.name == name]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(iter(self.iter_markers(name)), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


NEEDS = pytest.mark.needs("lab", "slurm")
PROMISE = pytest.mark.promise.with_args("a sentence")


@pytest.mark.parametrize(
    ("nodeid", "marks", "is_quick", "group"),
    [
        ("tests/unit/test_a.py::test_b", [], True, "tests/unit/test_a.py"),
        ("tests/unit/test_a.py::test_b", [NEEDS], False, "slurm"),
        ("tests/e2e/test_a.py::test_b", [], False, None),
        ("tests/e2e/test_a.py::test_b", [pytest.mark.quick], True, None),
        ("tests/e2e/test_a.py::test_b", [NEEDS, PROMISE], True, "slurm"),
    ],
)  # fmt: skip
def test_a_test_has_a_tier_and_a_group(nodeid, marks, is_quick, group):
    item = Item(nodeid, *marks)
    sort_into_tier(item)
    assert bool(item.get_closest_marker("quick")) is is_quick
    assert item.user_properties == ([("tier", "quick")] if is_quick else [])
    found = item.get_closest_marker("xdist_group")
    assert (found and found.args[0]) == group
