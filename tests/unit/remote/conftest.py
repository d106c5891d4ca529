"""Processes that tests start: none outlives its test, whatever became of its parent."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

_NAME = "TEST_OF_DISTMAGIC"


@pytest.fixture
def marks() -> Iterator[dict[str, str]]:
    """Return variables for a child process: after the test whatever has them is killed, orphans of the child too."""
    mark = {_NAME: secrets.token_hex(8)}
    yield mark
    while _kill_all(f"{_NAME}={mark[_NAME]}\0".encode()):
        continue  # one of them may have started another one meanwhile


@pytest.fixture
def home_in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home for tests that write it anew some hundred times."""
    there = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=there) as folder:
        monkeypatch.setenv("DISTMAGIC_HOME", f"{folder}/home")
        yield Path(folder, "home")


def _kill_all(mark: bytes) -> bool:
    """Kill the running processes with this text among their variables; return whether there were any."""
    found = False
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            # From now on the number is this process's alone.
            handle = os.pidfd_open(int(folder.name))
            try:
                # A zombie shows none.
                if mark in (folder / "environ").read_bytes() + b"\0":
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    found = True
            finally:
                os.close(handle)
    return found
