"""Killed for want of memory: the kernel's counters, of the machine and of cgroups, and where they are kept."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distmagic.remote.system import memory

GB = 10**9


def make(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], memory.Cgroup]:
    """Return a function that makes the cgroup of a process whose /proc/PID/cgroup says this."""

    def make_one(table: str) -> memory.Cgroup:
        real = memory.text_of
        monkeypatch.setattr(
            memory,
            "text_of",
            lambda path: table if path == Path("/proc/7/cgroup") else real(path),
        )
        return memory.Cgroup(7, tmp_path)

    return make_one


def test_a_cgroup_of_version_2(cgroup, tmp_path):
    make(
        tmp_path / "jobs/a/memory.events",
        "low 0\nmax 5\noom 1\noom_kill 1\noom_group_kill 0\n",
    )
    make(tmp_path / "jobs/a/memory.max", "max\n")
    make(tmp_path / "jobs/memory.max", "16000000000\n")
    one = cgroup("0::/jobs/a\n")
    assert (one.limit_bytes, one.has_killed()) == (16 * GB, False)
    make(tmp_path / "jobs/a/memory.events", "oom 2\noom_kill 2\n")
    assert one.has_killed()


def test_a_cgroup_of_version_1(cgroup, tmp_path):
    folder = tmp_path / "memory/docker/abc"
    make(folder / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    make(folder / "memory.limit_in_bytes", "8000000000\n")
    make(tmp_path / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    one = cgroup("9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n")
    make(folder / "memory.oom_control", "oom_kill 1\n")
    assert (one.limit_bytes, one.has_killed()) == (8 * GB, True)


def test_a_container_that_sees_only_its_own_cgroup(cgroup, tmp_path):
    make(tmp_path / "memory.events", "oom_kill 3\n")
    make(tmp_path / "memory.max", "4000000000\n")
    one = cgroup("0::/kubepods/pod1/abc\n")
    assert (one.limit_bytes, one.has_killed()) == (4 * GB, False)


@pytest.mark.parametrize("table", ["", "0::/\n", "nonsense", "4:memory:/gone\n"])
def test_no_cgroup(cgroup, table):
    one = cgroup(table)
    assert (one.limit_bytes, one.has_killed()) == (None, False)


def test_why(monkeypatch, cgroup, tmp_path):
    none = cgroup("")
    counts = [5, 5, 6, 7]
    monkeypatch.setattr(memory, "_count_of_host", lambda: counts.pop(0))
    watch = memory.Watch()
    assert watch.why(none) == ""
    assert watch.why(none) == memory.HOST_WIDE
    make(tmp_path / "memory.events", "oom_kill 3\n")
    make(tmp_path / "memory.max", "4000000000\n")
    limited = cgroup("0::/x\n")
    assert watch.why(limited) == memory.HOST_WIDE
    make(tmp_path / "memory.events", "oom_kill 4\n")
    why = "it reached its memory limit of 4.0 GB (its cgroup has counted a kill)"
    assert watch.why(limited) == why


def test_a_real_process_that_nobody_killed():
    """With this machine's own counters, whatever they are."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    watch, cgroup = memory.Watch(), memory.Cgroup(child.pid)
    child.kill()
    child.communicate()
    assert watch.why(cgroup) in ("", memory.HOST_WIDE)
