"""A rank that its kernel kills for want of memory, in earnest: the run says so, with the limit."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from distmagic.errors import RunError, WorkerFailed
from tests.e2e import faults, runner
from tests.e2e.runner import at_work
from tests.lab import Lab
from tests.lab.memory_limit import MemoryLimit, reason_without

pytestmark = pytest.mark.needs("lab")


@pytest.fixture
def limit(lab: Lab) -> Iterator[MemoryLimit]:
    """The limit of dm2."""
    if reason := reason_without():
        pytest.skip(reason)
    made = MemoryLimit(lab.hosts[1])
    yield made
    made.remove()


def fill() -> int:
    """Wait for a file `go`; then rank 1 takes 2 GB, and the other waits for it."""
    import os
    import time
    from pathlib import Path

    import distmagic

    distmagic.report(step=1)
    while os.environ["RANK"] == "0" or not Path("~/go").expanduser().exists():
        time.sleep(0.01)
    return len(b"x" * (2 << 30))


def test_a_rank_that_reaches_the_limit_of_its_cgroup(lab, limit):
    def go() -> None:
        # So that the rank is by far the largest when its kernel looks for one to kill.
        limit.set(600 << 20)
        (lab.hosts[1].home / "go").touch()

    error = runner.failure(
        lab, "dm1:1,dm2:1", fill, screen=runner.Watch(at_work(2), go)
    )
    assert isinstance(error, WorkerFailed)
    why = (
        r"it reached its memory limit of (\d\.\d) GB \(its cgroup has counted a kill\)"
    )
    found = re.search(why, error.message)
    assert found, error.message
    assert 0.6 <= float(found[1]) < 3  # what was used, and 600 MiB more
    assert error.message.startswith("rank 1 (dm2, local_rank 0) was ended by signal 9")


def test_torchrun_is_killed_for_want_of_memory(lab, limit):
    host = lab.hosts[1]

    def go() -> None:
        (torchrun,) = faults.pids(host, "torchrun", "*")
        # It before all others.
        host.exec(
            ["sh", "-c", f"echo 1000 > /proc/{torchrun}/oom_score_adj"]
        ).check_returncode()
        limit.set(100 << 20)
        (host.home / "go").touch()

    error = runner.failure(
        lab, "dm1:1,dm2:1", fill, screen=runner.Watch(at_work(2), go)
    )
    said = (
        r"dm2: its torchrun was killed: it reached its memory limit of \d\.\d GB \(.*\)"
    )
    assert isinstance(error, RunError)
    assert error.run is not None
    assert any(re.fullmatch(said, notice) for notice in error.run.state.notices), (
        error.run.state.notices
    )
