"""Which tests `make test` has, and the table of their durations."""

from __future__ import annotations

import pytest

from tests.tiers import sort_into_tier, takes_long


class Item:
    """A test as pytest has collected it, with these marks."""

    def __init__(
        self, nodeid: str, *marks: pytest.MarkDecorator, fixtures: tuple[str, ...] = ()
    ) -> None:
        self.nodeid = nodeid
        self.marks = [mark.mark for mark in marks]
        self.fixturenames = fixtures
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
        ("tests/e2e/test_a.py::test_b", [pytest.mark.together], False, "tests/e2e/test_a.py"),
    ],
)  # fmt: skip
def test_a_test_has_a_tier_and_a_group(nodeid, marks, is_quick, group):
    item = Item(nodeid, *marks)
    sort_into_tier(item)
    assert bool(item.get_closest_marker("quick")) is is_quick
    assert item.user_properties == ([("tier", "quick")] if is_quick else [])
    found = item.get_closest_marker("xdist_group")
    assert (found and found.args[0]) == group


def test_one_worker_loads_torch_for_the_tests_that_fork_it():
    item = Item("tests/unit/test_a.py::test_b", fixtures=("tmp_path", "torch_forks"))
    sort_into_tier(item)
    assert [mark.args for mark in item.iter_markers("xdist_group")] == [("torch",)]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (Item("tests/unit/test_a.py::test_b"), False),
        (Item("tests/unit/test_a.py::test_b", pytest.mark.timeout(900)), True),
        (Item("tests/unit/test_a.py::test_b", fixtures=("torch_forks",)), True),
    ],
)
def test_what_takes_long_comes_first(item, expected):
    assert takes_long(item) is expected
