"""What stands in the way of a job on a host: every sentence."""

from dataclasses import replace

import pytest

from distmagic.errors import PreflightError
from distmagic.planning.preflight import (
    check,
    check_among,
    check_oldest_python,
    check_python,
    check_system,
    clocks_apart,
    shared_machines,
)
from tests.builders.plans import FACTS


def test_the_same_minor_python_will_do():
    check_python("gpu-a", (3, 11, 2), (3, 11, 9), "/usr/bin/python3")


@pytest.mark.parametrize("found", [(3, 10, 2), (3, 12, 0)], ids=str)
def test_another_python(found, golden):
    with golden.raises(PreflightError):
        check_python("gpu-a", found, (3, 11, 9), "/usr/bin/python3")


@pytest.mark.parametrize("found", [(3, 9, 2), (2, 7, 18), ()], ids=str)
def test_a_python_that_is_too_old(found, golden):
    with golden.raises(PreflightError):
        check_oldest_python("gpu-a", found, "/usr/bin/python3")
    check_oldest_python("gpu-a", (3, 10, 0), "/usr/bin/python3")


def test_hosts_are_linux(golden):
    check_system("gpu-a", "linux")
    with golden.raises(PreflightError):
        check_system("mac", "darwin")


def test_one_machine_under_several_names_is_told_of(golden):
    one = replace(FACTS, host_id="0badcafe")
    other = replace(one, host_id="00c0ffee")
    golden(*shared_machines(("a", "b", "c"), (one, other, one)))
    golden(*shared_machines(("a", "b", "c"), (one, one, one)))
    assert shared_machines(("a", "b"), (one, other)) == ()
    assert shared_machines(("a", "b"), (FACTS, FACTS)) == (), (
        "of hosts that don't tell nothing is known"
    )
    assert shared_machines(("a", "b"), (one, replace(one, state_dir="/else"))) == (), (
        "as in a playground"
    )


def test_no_torch(golden):
    with golden.raises(PreflightError):
        check("gpu-a", replace(FACTS, torch=None), "2.13.0")


@pytest.mark.parametrize("why", ["No space left on device", "Read-only file system"])
def test_a_home_in_which_nothing_can_be_written(why, golden):
    """The disk may have room: a quota is full, or all inodes are taken."""
    with golden.raises(PreflightError):
        check("gpu-a", replace(FACTS, write_error=why), None)


def test_a_full_disk(golden):
    with golden.raises(PreflightError):
        check("gpu-a", replace(FACTS, free_bytes=5 << 20), None)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("2.13.0", "2.13.0"),
        ("2.13.1+cu130", "2.13.0+cpu"),
        ("2.13.0", None),
        ("unknown", "2.13.0"),
        ("2.13.0", "unknown"),
        ("dev", "2.13.0"),
        ("2.13.0a0+gitabc", "2.13.0"),
    ],
)
def test_torch_that_will_do(theirs, ours):
    assert check("gpu-a", replace(FACTS, torch=theirs), ours) == ()


def test_torch_that_may_do(golden):
    golden(*check("gpu-a", replace(FACTS, torch="2.9.1"), "2.13.0"))


def test_torch_that_will_not_do(golden):
    with golden.raises(PreflightError):
        check("gpu-a", replace(FACTS, torch="1.13.1+cu117"), "2.13.0")


def test_all_hosts_have_the_same_torch(golden):
    one, other = replace(FACTS, torch="2.13.0+cpu"), replace(FACTS, torch="2.12.0")
    check_among(("a",), (one,))
    check_among(("a", "b"), (one, replace(FACTS, torch="2.13.1+cu130")))
    check_among(("a", "b", "c"), (one, replace(FACTS, torch="unknown"), one))
    for names in (("a", "b", "c"), ("127.0.0.1",) * 3):
        with golden.raises(PreflightError):
            check_among(names, (one, one, other))


def test_a_host_that_ends_runs_with_their_connection_is_a_warning(golden):
    golden(*check("gpu-a", replace(FACTS, logout="systemd ends a run here."), "2.13.0"))


def test_hosts_whose_clocks_are_apart_are_named_with_how_far_and_the_cure(golden):
    at = 1.7e9
    clocks = [
        ("a", at, at + 0.1),
        ("b", at + 5.1, at + 5.2),
        ("c", at - 3600, at - 3599.9),
        ("d", at - 1.9, at + 2.1),
    ]
    golden(*clocks_apart(clocks))


def test_clocks_that_are_apart_on_both_sides_of_the_firsts_are_named(golden):
    golden(*clocks_apart([("a", 0.0, 0.1), ("b", 2.0, 2.1), ("c", -2.0, -1.9)]))


def test_a_clock_that_was_slow_to_answer_is_not_blamed():
    """What was asked 30 s ago may be right: the answer says no more than that it came within this time."""
    assert clocks_apart([("a", 100.0, 130.0), ("b", 129.0, 129.1)]) == ()
    assert clocks_apart([("a", 100.0, 130.0), ("b", 133.0, 133.1)]) != ()
    assert clocks_apart([]) == clocks_apart([("a", 1.0, 2.0)]) == ()
