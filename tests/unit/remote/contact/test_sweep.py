"""What is ended of a job whose agent and contact were killed together."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distmagic.remote.contact import sweep
from distmagic.remote.records import places
from distmagic.remote.system import processes

_JOB = f"swept-{os.getpid()}"


@pytest.fixture
def deserted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of sockets of an agent that is gone."""
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))
    path = places.make_run_dir(_JOB, 0)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def daemon() -> Iterator[subprocess.Popen[bytes]]:
    """A process without variables, in a session of its own: nothing of it says whose it is."""
    child = subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
    yield child
    child.kill()
    child.wait()


@pytest.mark.parametrize(
    "come",
    [sweep.sweep_dead, lambda: sweep.sweep_node(_JOB, 0), lambda: sweep.sweep_node(_JOB, None)],
)  # fmt: skip
def test_a_daemon_without_variables_ends_with_what_its_agent_noted(
    deserted: Path, daemon: subprocess.Popen[bytes], come: Callable[[], object]
) -> None:
    own = processes.read(daemon.pid)
    assert own is not None
    processes.note_all((own,), deserted / places.STARTED)
    os.utime(deserted, (time.time() - 60,) * 2)
    come()
    assert daemon.wait(20) == -9
    assert not deserted.exists()


def test_a_process_that_has_a_number_of_before_is_left_alone(
    deserted: Path, daemon: subprocess.Popen[bytes]
) -> None:
    (deserted / places.STARTED).write_text(f"{daemon.pid} 1\nno number\n")
    os.utime(deserted, (time.time() - 60,) * 2)
    sweep.sweep_dead()
    assert daemon.poll() is None
    assert not deserted.exists()


def test_what_an_agent_that_lives_has_noted_goes_on(
    deserted: Path, daemon: subprocess.Popen[bytes]
) -> None:
    own = processes.read(daemon.pid)
    assert own is not None
    processes.note_all((own,), deserted / places.STARTED)
    listener = places.reader_listener(deserted)
    os.utime(deserted, (time.time() - 60,) * 2)
    sweep.sweep_dead()
    assert daemon.poll() is None
    listener.close()
