"""The job that keeps a cluster of SkyPilot from stopping: it lives as long as a job of distmagic runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from distmagic.remote.keeper import hold, processes
from tests.lab.waiting import HANG_S, wait_until

_WAITS = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def waiting(job: str) -> subprocess.Popen[bytes]:
    """Start a process that ends when its stdin does; `job` is the job that it belongs to."""
    variables = {**os.environ, "DISTMAGIC_JOB": job}
    return subprocess.Popen(_WAITS, stdin=subprocess.PIPE, env=variables)


@pytest.mark.parametrize(("job", "is_held"), [("1122-aa", True), ("--template", False)])
def test_it_goes_on_while_a_job_runs_and_ends_after_the_idle_time(
    job, is_held, monkeypatch
):
    looks: list[dict[int, int]] = []
    process = waiting(job)

    def look() -> dict[int, int]:
        looks.append(processes.parents())
        # Jobs of other tests on this machine are left out.
        return {pid: 1 for pid in looks[-1] if pid == process.pid}

    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds  # and no more where this machine is late
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=sleep)
    monkeypatch.setattr(hold, "time", clock)
    monkeypatch.setattr(hold, "parents", look)
    holding = threading.Thread(target=hold.main, args=('{"idle_s": 0.2}',))
    holding.start()
    if is_held:
        wait_until(lambda: now_s > 0.5, "more than the idle time")
        assert holding.is_alive()
        process.communicate()
    holding.join(HANG_S)
    assert not holding.is_alive()
    assert looks
    if not is_held:
        assert process.poll() is None
        process.communicate()
