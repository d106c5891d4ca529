"""The doctor's questions, over real links to hosts that answer by script."""

from __future__ import annotations

import threading
import time
import types

import numpy as np

from distmagic.connection import first_links
from distmagic.remote.wire import protocol as p
from distmagic.request.access import Access
from distmagic.session import doctor
from tests.builders.hosts import HANG_UP, FakeHost, down, reach
from tests.builders.jobs import assert_left
from tests.lab import wait_until


def examined(name: str, time_s: float = 0.0) -> p.Examined:
    route = p.Route(address="10.0.0.1", interface="eth0", time_s=time_s)
    return p.Examined(
        hostname=name,
        name_addresses=("10.0.0.1",),
        shm_bytes=1 << 40,
        route=route,
        ports=(0, 40001),
    )


def well(name: str) -> FakeHost:
    host = FakeHost(name)
    host.answers[p.Examine] = lambda _: [examined(name)]
    return host


def test_each_host_is_asked_once_and_a_host_that_is_down_is_a_finding():
    a, b, c = well("gpu-a"), FakeHost("gpu-b"), well("gpu-c")
    b.error = down("gpu-b")
    report = doctor.examine(reach(a, b, c), packages=("mine", "numpy"))
    assert ("gpu-b", "connection") in {(one.host, one.check) for one in report.findings}
    for host in (a, c):
        (request,) = host.requests_of(p.Examine)
        assert isinstance(request, p.Examine)
        assert {"mine", "torch"} <= set(request.packages)
        assert len(set(request.packages)) == len(request.packages)
    assert_left(a, c)


def test_no_host_that_answers_is_no_error_of_the_command():
    a = FakeHost("gpu-a")
    a.error = down("gpu-a")
    report = doctor.examine(reach(a))
    assert [(one.host, one.level) for one in report.findings] == [("gpu-a", "error")]


def test_a_host_that_hangs_up_in_the_middle_is_a_finding():
    a, b = well("gpu-a"), FakeHost("gpu-b")
    b.answers[p.Examine] = lambda _: HANG_UP
    report = doctor.examine(reach(a, b))
    assert ("gpu-b", "connection") in {(one.host, one.check) for one in report.findings}
    assert_left(a, b)


def test_a_host_that_never_answers_is_given_up_when_the_others_have(monkeypatch):
    monkeypatch.setattr(first_links, "_LONGER_S", 0.1)
    a, b, c = well("gpu-a"), well("gpu-b"), FakeHost("gpu-c")
    c.barriers["boot"] = threading.Barrier(2)
    report = doctor.examine(reach(a, b, c, access=Access(connect_timeout_s=0.1)))
    found = {(one.host, one.check): one for one in report.findings}
    assert "gave no answer" in found["gpu-c", "connection"].evidence
    c.barriers.pop("boot").abort()
    wait_until(lambda: c.is_left, "the late link to be closed")
    assert_left(a, b)


def test_packages_of_a_notebook_are_known_by_what_its_cells_have_imported():
    import json

    names = {
        "np": np,
        "mean": np.mean,
        "text": "numpy",
        "json": json,
        "own": wait_until,
    }
    assert doctor.imported(names) == ("numpy", "tests")
    assert doctor.imported({"x": types.ModuleType("sklearn.svm")}) == ("scikit-learn",)
    assert doctor.imported({}) == ()


def test_the_port_of_a_rendezvous_that_nobody_could_dial():
    assert doctor.port_in("10.0.0.1 port 29533 (Connection refused)") == 29533
    assert doctor.port_in("nothing is said of it") == 0


def test_of_two_hosts_the_one_whose_clock_is_not_this_machines_is_named():
    a, b = well("gpu-a"), well("gpu-b")
    a.answers[p.Examine] = lambda _: [examined("gpu-a", time.time() + 300)]
    b.answers[p.Examine] = lambda _: [examined("gpu-b", time.time())]
    report = doctor.examine(reach(a, b))
    (finding,) = (one for one in report.findings if one.check == "clock")
    assert finding.host == "gpu-a"


def test_an_answer_that_is_none_counts_as_something_else_behind_the_door():
    a, b = well("gpu-a"), well("gpu-b")
    for host in (a, b):
        host.answers[p.Knock] = lambda _: [p.Knocked(answers=("rubbish",))]
    report = doctor.examine(reach(a, b))
    found = {(one.host, one.check): one.evidence for one in report.findings}
    assert "something else answers" in found["gpu-b", "dialled from gpu-a"]
    assert "something else answers" in found["gpu-a", "dialled from gpu-b"]
    for host, other in ((a, b), (b, a)):
        (asked,), (knock,) = other.requests_of(p.Examine), host.requests_of(p.Knock)
        assert isinstance(asked, p.Examine)
        assert isinstance(knock, p.Knock)
        (door,) = knock.doors
        assert (door.port, door.secret) == (40001, asked.secret), (
            "no port that is taken"
        )
    assert_left(a, b)
