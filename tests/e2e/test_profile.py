"""Ranks that train on real hosts are profiled: one trace of all, and the rank that the others wait for."""

import gzip
import json
from pathlib import Path

import pytest

import distmagic
from distmagic.errors import UsageError
from distmagic.session.background import BackgroundRun
from tests.e2e import runner
from tests.e2e.programs import train_until_told
from tests.lab import wait_until

pytestmark = pytest.mark.needs("lab")


def test_running_ranks_are_profiled_and_train_on(ended, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = distmagic.run(
        runner.as_value(train_until_told),
        hosts="dm1:1,dm2:1",
        access=runner.access(ended),
        background=True,
    )
    assert isinstance(run, BackgroundRun)
    try:
        wait_until(lambda: len(run.state.series) == 2, "the first steps")
        found = run.profile(steps=3)
    finally:
        for host in ended.hosts[:2]:
            host.exec(["touch", "/tmp/enough"]).check_returncode()
    run.wait()
    for host in ended.hosts[:2]:
        host.exec(["rm", "/tmp/enough"]).check_returncode()
    assert found.notes == ()
    assert found.hosts == {0: "dm1", 1: "dm2"}
    assert [one.rank for one in found.waits] == [1, 0]
    assert found.waits[1].waits_ms > 50
    assert len(found.ops) == 10
    assert list(Path().iterdir()) == [found.path]
    events = json.loads(gzip.decompress(found.path.read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    names = {
        event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert names == {"rank 0 (dm1)", "rank 1 (dm2)"}
    forward = [event["pid"] for event in events if event["name"] == "aten::addmm"]
    assert sorted(forward) == [0, 0, 0, 1, 1, 1]
    with pytest.raises(UsageError, match=f"job {run.job} "):
        run.profile()
