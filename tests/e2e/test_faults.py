"""The faults that a run survives, or ends of in good order: one row a fault, with what its user is told.

Every row is a test with real hosts. After each, whatever was told: no process, socket or temporary file of ours is left
on any host that is up, and all that the ranks wrote was shown exactly once (of a lost host: what came before).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import faults
from tests.e2e.fault_table import ALONE, TABLE

README = Path(__file__).parents[2] / "README.md"

PROMISE = pytest.mark.promise("faults are tested, alone and in pairs")
# That of README which one row proves by itself.
RESTORED = pytest.mark.promise(
    "a broken connection is restored while the ranks continue"
)


def kind(fault: faults.Fault) -> str:
    """Return what is struck, whosever it is: "agent" of "agent of a member"; a firewall is in a link's way."""
    return fault.process.split()[0].removesuffix("'s").replace("firewall", "link")


# Of each kind of process, link or disk that is struck, the first row carries the promise.
FIRST = {kind(fault): fault for fault in reversed(TABLE)}


def marks_of(fault: faults.Fault) -> list[pytest.MarkDecorator]:
    marks = [PROMISE] if fault is FIRST.get(kind(fault)) else []
    return [*marks, RESTORED] if fault.name == "contact, training: SIGKILL" else marks


@pytest.mark.needs("lab")
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=marks_of(fault))
        for fault in (*TABLE, *ALONE)
    ],
)
def test_one_fault(lab, fault):
    fault.way.before(lab)
    told = faults.play(fault, lab)
    assert told.outcome == fault.outcome
    fault.way.at_last(lab)
    lab.assert_clean()
    faults.assert_read_once(lab, told)
    if told.outcome == "done":
        assert {one.is_whole for one in told.ranks} == {True}
        assert set(told.results.values()) == {fault.way.numbers}


@PROMISE
def test_the_readme_says_how_many():
    assert f"{len(TABLE)} faults" in README.read_text()
    assert len({fault.name for fault in TABLE}) == len(TABLE) >= 25
