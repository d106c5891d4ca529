"""What finds out how ranks are: by their calls, by NCCL's health service, by a profile; and the doctor."""

from __future__ import annotations

import gzip
import json

import pytest

import distmagic
from distmagic.api import session
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import Hung
from distmagic.request.access import Access
from distmagic.request.hosts import parse_hosts
from distmagic.session.background import BackgroundRun
from distmagic.session.doctor import examine
from tests.e2e.runner import as_value, at_work
from tests.gpu import programs
from tests.lab import wait_until

WAYS = pytest.mark.parametrize("way", ["cpu gloo", "cuda gloo", "cuda nccl"])
HOSTS = "node1:1,node2:1"


def split(way: str, request: pytest.FixtureRequest) -> tuple[str, str]:
    device, backend = way.split()
    if device == "cuda":
        request.getfixturevalue("gpus")
    return device, backend


@WAYS
@pytest.mark.parametrize("is_absent", [False, True])
def test_ranks_that_part_are_named_by_their_calls(run, request, way, is_absent):
    device, backend = split(way, request)
    with pytest.raises(Hung) as caught:
        run(
            with_helpers(programs.part), backend, device, is_absent, hosts=HOSTS, hang_timeout_s=20.0
        )  # fmt: skip
    found = caught.value.message
    print(found)
    first, other = found.index("rank 1 (node2,"), found.index("rank 0 (node1,")
    assert first < other
    assert ("broadcast [4] at" in found) == (not is_absent)
    assert "all_reduce" in found[other:]


def test_nccl_is_asked_for_processes_that_give_no_answer(run, gpus):
    sound, stopped = run(with_helpers(programs.ask_nccl), hosts=HOSTS).results[0]
    print(stopped)
    assert sound == ""
    assert "INCOMPLETE" in stopped


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_at_work_are_profiled(hosts, tmp_path, monkeypatch, request, device):
    if device == "cuda":
        request.getfixturevalue("gpus")
    monkeypatch.chdir(tmp_path)
    run = distmagic.run(
        as_value(programs.train_until), device, str(tmp_path / "enough"),
        hosts="node1:2", access=Access(ssh_config=hosts.ssh_config), background=True,
    )  # fmt: skip
    assert isinstance(run, BackgroundRun)
    try:
        wait_until(lambda: at_work(2)(run.state), "the first steps")
        found = run.profile(steps=3)
    finally:
        (tmp_path / "enough").touch()
    run.wait()
    assert found.notes == ()
    print(found)
    events = json.loads(gzip.decompress(found.path.read_bytes()))["traceEvents"]
    kernels = {event["pid"] for event in events if event.get("cat") == "kernel"}
    assert kernels == ({0, 1} if device == "cuda" else set())


def test_the_doctor_finds_nothing_wrong_with_sound_gpus(hosts, gpus):
    way = Access(ssh_config=hosts.ssh_config)
    asker = NotebookAsker(can_ask=False)
    report = examine(session().reach(parse_hosts("node1,node2"), way, asker))
    print(report)
    assert report.findings == ()


def with_helpers(program):
    """Return a program that is pickled with the helper which it calls."""
    twin = as_value(program)
    twin.__globals__["meet"] = as_value(programs.meet)
    return twin
