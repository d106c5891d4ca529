"""What is ended of a job whose agent and contact were killed together."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distmagic.remote.contact import sweep
from distmagic.remote.records import places
from distmagic.remote.system import processes
from tests import REPOSITORY
from tests.lab import wait_until

_JOB = f"swept-{os.getpid()}"
# A rank whose agent is killed: what it leaves has no variables, and a session of its own.
_RANK = """
import subprocess, sys
from distmagic.remote.system import processes
processes.mark_by_limit(sys.argv[1])
child = subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid)
"""


@pytest.fixture
def deserted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of sockets of an agent that is gone."""
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))
    path = places.make_run_dir(_JOB, 0)
    yield path
    shutil.rmtree(path, ignore_errors=True)


Start = Callable[[str], processes.ProcessInfo]


@pytest.fixture
def start() -> Iterator[Start]:
    """Has a job leave a daemon that nothing but the job's limit tells from any other process."""
    started = []

    def leave(job: str) -> processes.ProcessInfo:
        argv = [sys.executable, "-c", _RANK, job]
        done = subprocess.run(argv, check=True, cwd=REPOSITORY, capture_output=True)
        daemon = processes.read(int(done.stdout))
        assert daemon is not None
        started.append(daemon)
        return daemon

    yield leave
    for daemon in started:
        processes.send(daemon, 9)


def is_there(process: processes.ProcessInfo) -> bool:
    now = processes.read(process.pid)
    return now is not None and now.started == process.started and now.state not in "ZX"


@pytest.mark.parametrize(
    "come",
    [sweep.sweep_dead, lambda: sweep.sweep_node(_JOB, 0), lambda: sweep.sweep_node(_JOB, None)],
)  # fmt: skip
def test_a_daemon_without_variables_ends_with_its_job(deserted, start, come):
    daemon, of_another = start(_JOB), start(f"{_JOB}-not")
    os.utime(deserted, (time.time() - 60,) * 2)
    come()
    wait_until(lambda: not is_there(daemon), "its end")
    assert is_there(of_another)
    assert not deserted.exists()


def test_what_an_agent_that_lives_has_started_goes_on(deserted, start):
    daemon = start(_JOB)
    listener = places.reader_listener(deserted)
    os.utime(deserted, (time.time() - 60,) * 2)
    sweep.sweep_dead()
    assert is_there(daemon)
    listener.close()
