"""The job that keeps a cluster of SkyPilot from stopping: it lives as long as a job of distmagic runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from distmagic.remote.keeper import hold
from tests.lab.waiting import wait_until

_WAITS = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def waiting(job: str) -> subprocess.Popen[bytes]:
    """Start a process that ends when its stdin does; `job` is the job that it belongs to."""
    variables = {**os.environ, "DISTMAGIC_JOB": job}
    return subprocess.Popen(_WAITS, stdin=subprocess.PIPE, env=variables)


def test_it_goes_on_while_a_job_runs_and_ends_after_the_idle_time(
    monkeypatch: pytest.MonkeyPatch,
):
    looked: list[bool] = []
    real = hold.has_job

    def look() -> bool:
        looked.append(real())
        return looked[-1]

    job = waiting("1122-101010-aa")
    # Jobs of other tests on this machine are left out.
    monkeypatch.setattr(os, "listdir", lambda _: [str(job.pid), "self", "net"])
    monkeypatch.setattr(hold, "has_job", look)
    monkeypatch.setattr(hold, "LOOK_S", 0.01)
    holding = threading.Thread(target=hold.main, args=('{"idle_s": 0.2}',))
    holding.start()
    wait_until(lambda: any(looked), "the job to be seen")
    after = time.monotonic() + 0.4
    wait_until(lambda: time.monotonic() > after, "more than the idle time")
    assert holding.is_alive()
    job.communicate()
    holding.join(30)
    assert not holding.is_alive()


@pytest.mark.parametrize("mark", ["", "--template"])
def test_what_is_only_kept_loaded_is_no_job(mark: str, monkeypatch):
    """A template has dashes in place of a job."""
    process = waiting(mark)
    monkeypatch.setattr(os, "listdir", lambda _: [str(process.pid), "self", "net"])
    assert not hold.has_job()
    process.communicate()
