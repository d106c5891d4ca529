"""Killed for want of memory: the kernel's words as real kernels write them, its counters, and where they are kept."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.remote.system import memory, processes
from distmagic.remote.system.memory import Kill

GB = 10**9
HOST = """\
python invoked oom-killer: gfp_mask=0x140dca(GFP_HIGHUSER_MOVABLE|__GFP_COMP|__GFP_ZERO), order=0, oom_score_adj=0
[  71345]  1000 71345 17170432 14941406 119812096        0             0 python
oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/user.slice,task=python,pid=71345,uid=1000
Out of memory: Killed process 71345 (python) total-vm:68681728kB, anon-rss:59765625kB, file-rss:1024kB, shmem-rss:1024kB, UID:1000 pgtables:117004kB oom_score_adj:0
oom_reaper: reaped process 71345 (python), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB
"""
CGROUP = """\
oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/job_7,task_memcg=/job_7,task=pt_main_thread,pid=812,uid=0
Memory cgroup out of memory: Killed process 812 (pt_main_thread) total-vm:20971520kB, anon-rss:15625000kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:31000kB oom_score_adj:0
"""
OLD = """\
Memory cgroup out of memory: Kill process 33 (python3) score 997 or sacrifice child
Killed process 33 (python3) total-vm:300000kB, anon-rss:250000kB, file-rss:10000kB
"""
RED_HAT = "Killed process 44 (python), UID 1001, total-vm:300000kB, anon-rss:250000kB, file-rss:0kB, shmem-rss:0kB\n"
KERN_LOG = f"Nov 21 12:00:01 gpu-a kernel: [ 1234.567890] {HOST.splitlines()[3]}\n"


def a_process(pid: int, name: str = "python") -> processes.ProcessInfo:
    return processes.ProcessInfo(
        pid=pid, parent=1, started=1, state="Z", name=name, exit_status=9
    )


@pytest.mark.parametrize(
    ("text", "kill"),
    [
        (
            HOST,
            Kill(pid=71345, name="python", used_bytes=59767673 << 10, in_cgroup=False),
        ),
        (
            CGROUP,
            Kill(
                pid=812,
                name="pt_main_thread",
                used_bytes=15625000 << 10,
                in_cgroup=True,
            ),
        ),
        (OLD, Kill(pid=33, name="python3", used_bytes=260000 << 10, in_cgroup=True)),
        (
            RED_HAT,
            Kill(pid=44, name="python", used_bytes=250000 << 10, in_cgroup=False),
        ),
        (
            KERN_LOG,
            Kill(pid=71345, name="python", used_bytes=59767673 << 10, in_cgroup=False),
        ),
    ],
    ids=["host", "cgroup", "old", "red hat", "kern.log"],
)
def test_what_kernels_write(text, kill):
    assert memory.kills(text) == (kill,)
    assert memory.kills(f"noise\n{text}{text}") == (kill, kill)


@pytest.mark.parametrize(
    "text",
    ["", "Killed", "eth0: link up\n", "oom_reaper: reaped process 7 (python), now\n"],
)
def test_what_is_no_kill(text):
    assert memory.kills(text) == ()


@given(st.text())
def test_any_text(text):
    assert isinstance(memory.kills(text + HOST + text), tuple)


def test_the_record_of_this_process():
    found = memory.kills(
        HOST + CGROUP + HOST.replace("71345", "5").replace("59765625", "1000")
    )
    for pid, name, in_container, expected in (
        (71345, "python", False, found[0]),
        (5, "python", False, found[2]),
        (5, "sh", False, None),  # the number is used again
        (6, "python", False, None),
        (6, "python", True, found[2]),
        (6, "sh", True, None),
    ):
        assert (
            memory.choose(found, a_process(pid, name), in_container=in_container)
            == expected
        )


@pytest.mark.parametrize(
    ("text", "limit", "words"),
    [
        (HOST, None, "the host ran out of memory (kernel: python used 61.2 of 62.8 GB)"),
        (CGROUP, 16 * GB, "it reached its memory limit (kernel: pt_main_thread used 16.0 of the 16.0 GB that its cgroup may use)"),
        (CGROUP, None, "it reached its memory limit (kernel: pt_main_thread used 16.0 GB)"),
    ],
)  # fmt: skip
def test_a_record_in_words(text, limit, words):
    (kill,) = memory.kills(text)
    assert memory.words(kill, total_bytes=62_800_000_000, limit_bytes=limit) == words


def test_records_of_the_ring():
    """One record a read; what programs have written into the kernel's log is not the kernel's word."""
    killed = HOST.splitlines()[3]
    answers: list[bytes | int] = [
        b"6,1,100,-;eth0: link up\n SUBSYSTEM=net\n",
        errno.EPIPE,
        f"3,2,200,-;{killed}\n".encode(),
        f"12,3,300,-;{killed}\n".encode(),
        b"broken",
        b"6,4,400,-;\xff\n",
        errno.EAGAIN,
    ]

    def read() -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer

    assert memory.records(read).splitlines() == ["eth0: link up", killed, "\ufffd"]
    assert memory.records(lambda: b"") == ""


def make(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


Change = Callable[[str], None]


@pytest.fixture
def cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], memory.Cgroup]:
    """Return a function that makes the cgroup of a process whose /proc/PID/cgroup says this."""

    def make_one(table: str) -> memory.Cgroup:
        real = memory._text_of
        monkeypatch.setattr(
            memory,
            "_text_of",
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


@pytest.fixture
def watch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., memory.Watch]:
    """Return a function that begins to watch a host without /dev/kmsg, and then changes its log and its count."""

    def begin(log: str = "", host_kills: int = 0) -> memory.Watch:
        counts = [0, host_kills]
        path = tmp_path / "kern.log"
        path.write_text(HOST.replace("python", "older"))
        monkeypatch.setattr(memory, "_KMSG", str(tmp_path / "none"))
        monkeypatch.setattr(memory, "_LOGS", (str(path), str(tmp_path / "no.log")))
        monkeypatch.setattr(memory, "_count_of_host", lambda: counts.pop(0))
        monkeypatch.setattr(memory, "_total_bytes", lambda: 62_800_000_000)
        monkeypatch.setattr(memory, "_in_container", lambda: False)
        made = memory.Watch()
        with path.open("a") as file:
            file.write(log)
        return made

    return begin


def test_why(watch, cgroup, tmp_path):
    none = cgroup("")
    told = "the host ran out of memory (kernel: python used 61.2 of 62.8 GB)"
    assert watch(KERN_LOG, 1).why(a_process(71345), none) == told
    assert watch(KERN_LOG, 1).why(a_process(7), none) == memory.HOST_WIDE
    assert watch().why(a_process(71345), none) == ""
    assert watch(KERN_LOG).why(None, none) == ""
    make(tmp_path / "memory.events", "oom_kill 3\n")
    make(tmp_path / "memory.max", "4000000000\n")
    limited = cgroup("0::/x\n")
    make(tmp_path / "memory.events", "oom_kill 4\n")
    assert (
        watch().why(a_process(7), limited)
        == "it reached its memory limit of 4.0 GB (its cgroup has counted a kill)"
    )


def test_a_real_process_that_nobody_killed():
    """With this machine's own kernel log and cgroups, whatever they are."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    watch, cgroup = memory.Watch(), memory.Cgroup(child.pid)
    process = processes.read(child.pid)
    child.kill()
    child.communicate()
    assert watch.why(process, cgroup) in ("", memory.HOST_WIDE)
