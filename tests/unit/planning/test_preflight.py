"""What stands in the way of a job on a host: every sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distmagic.errors import PreflightError
from distmagic.planning.preflight import (
    check,
    check_among,
    check_oldest_python,
    check_python,
    check_system,
    shared_machines,
)
from tests.builders.plans import FACTS


def test_the_same_minor_python_will_do():
    check_python("gpu-a", (3, 11, 2), (3, 11, 9), "/usr/bin/python3")


@pytest.mark.parametrize(
    ("found", "shown"),
    [((3, 10, 2), "3.10.2"), ((3, 12, 0), "3.12.0")],
)
def test_another_python(found, shown):
    with pytest.raises(PreflightError) as caught:
        check_python("gpu-a", found, (3, 11, 9), "/usr/bin/python3")
    assert str(caught.value) == (
        f"gpu-a: Python {shown} (/usr/bin/python3), but this notebook runs Python 3.11.9; "
        "a job that runs takes in only hosts of that minor version.\n"
        "Name a Python 3.11 on that host: --python gpu-a=/path/to/python3.11. "
        "A job that begins on a host with another Python takes in any."
    )


@pytest.mark.parametrize(
    ("found", "shown"), [((3, 9, 2), "3.9.2"), ((2, 7, 18), "2.7.18"), ((), "")]
)
def test_a_python_that_is_too_old(found, shown):
    with pytest.raises(PreflightError) as caught:
        check_oldest_python("gpu-a", found, "/usr/bin/python3")
    assert str(caught.value) == (
        f"gpu-a: Python {shown} (/usr/bin/python3); hosts need Python 3.10 or a later one.\n"
        "Name another Python on that host: --python gpu-a=/path/to/python"
    )
    check_oldest_python("gpu-a", (3, 10, 0), "/usr/bin/python3")


def test_hosts_are_linux():
    check_system("gpu-a", "linux")
    with pytest.raises(PreflightError) as caught:
        check_system("mac", "darwin")
    assert (
        str(caught.value)
        == "mac: runs darwin; hosts of distmagic are Linux machines.\nUse a Linux host."
    )


def test_one_machine_under_several_names_is_told_of():
    one = replace(FACTS, host_id="0badcafe")
    other = replace(one, host_id="00c0ffee")
    assert shared_machines(("a", "b", "c"), (one, other, one)) == (
        "a and c are one machine: the ranks of all of them share its devices and memory.",
    )
    assert shared_machines(("a", "b", "c"), (one, one, one)) == (
        "a, b and c are one machine: the ranks of all of them share its devices and memory.",
    )
    assert shared_machines(("a", "b"), (one, other)) == ()
    assert shared_machines(("a", "b"), (FACTS, FACTS)) == (), (
        "of hosts that don't tell nothing is known"
    )
    assert shared_machines(("a", "b"), (one, replace(one, state_dir="/else"))) == (), (
        "as in a playground"
    )


def test_no_torch():
    with pytest.raises(PreflightError) as caught:
        check("gpu-a", replace(FACTS, torch=None), "2.13.0")
    assert str(caught.value) == (
        "gpu-a: Python /usr/bin/python3 has no torch.\n"
        "Install torch there, or name a Python that has it: --python gpu-a=/path/to/python"
    )


@pytest.mark.parametrize("why", ["No space left on device", "Read-only file system"])
def test_a_home_in_which_nothing_can_be_written(why):
    """The disk may have room: a quota is full, or all inodes are taken."""
    with pytest.raises(PreflightError) as caught:
        check("gpu-a", replace(FACTS, write_error=why), None)
    assert str(caught.value) == (
        f"gpu-a: can't write to /home/me/.distmagic: {why}.\n"
        "Make room or make it writable, or set DISTMAGIC_HOME on the host to a directory elsewhere."
    )


def test_a_full_disk():
    with pytest.raises(PreflightError) as caught:
        check("gpu-a", replace(FACTS, free_bytes=5 << 20), None)
    assert str(caught.value) == (
        "gpu-a: the disk under /home/me/.distmagic is full (5 MiB free).\n"
        "Make room there, or set DISTMAGIC_HOME on the host to a directory on another disk."
    )


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


def test_torch_that_may_do():
    assert check("gpu-a", replace(FACTS, torch="2.9.1"), "2.13.0") == (
        "gpu-a has torch 2.9.1, this notebook 2.13.0: modules that travel may not load.",
    )


def test_torch_that_will_not_do():
    with pytest.raises(PreflightError) as caught:
        check("gpu-a", replace(FACTS, torch="1.13.1+cu117"), "2.13.0")
    assert str(caught.value) == (
        "gpu-a: torch 1.13.1+cu117, but this notebook has torch 2.13.0; tensors and modules don't travel between them.\n"
        "Install torch 2.13 there, or name a Python that has it: --python gpu-a=/path/to/python"
    )


def test_all_hosts_have_the_same_torch():
    one, other = replace(FACTS, torch="2.13.0+cpu"), replace(FACTS, torch="2.12.0")
    check_among(("a",), (one,))
    check_among(("a", "b"), (one, replace(FACTS, torch="2.13.1+cu130")))
    check_among(("a", "b", "c"), (one, replace(FACTS, torch="unknown"), one))
    for names in (("a", "b", "c"), ("127.0.0.1",) * 3):
        with pytest.raises(PreflightError) as caught:
            check_among(names, (one, one, other))
        assert str(caught.value) == (
            f"{names[2]}: torch 2.12.0, but {names[0]} has torch 2.13.0+cpu; the ranks of one job need the same minor version.\n"
            "Install the same torch on all hosts, or name Pythons that have it with --python HOST=PATH."
        )


def test_a_host_that_ends_runs_with_their_connection_is_a_warning():
    assert check(
        "gpu-a", replace(FACTS, logout="systemd ends a run here."), "2.13.0"
    ) == ("gpu-a: systemd ends a run here.",)
