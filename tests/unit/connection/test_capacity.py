"""The limits of this machine, which are looked at before hosts are reached: what is too low, and how it is raised."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from distmagic.connection import capacity
from distmagic.connection.capacity import (
    BY_PARAMIKO,
    BY_SSH_PROGRAM,
    HostUsage,
    Resource,
    shortage,
)
from distmagic.connection.connections import Connections
from distmagic.errors import SpecError
from distmagic.request.hosts import parse_hosts
from distmagic.request.spec import Access
from distmagic.session.session import Session
from tests import REPOSITORY


def files(limit: int | None, used: int = 100) -> Resource:
    return Resource(
        name="open files of this process", source="allowed (ulimit -n)", each=1.5, used=used, limit=limit,
        cure="Run `ulimit -n {needed}`",
    )  # fmt: skip


@pytest.mark.parametrize(("hosts", "limit"), [(512, 868), (512, None), (1, 102)])
def test_there_is_room(hosts, limit):
    assert shortage(hosts, [files(limit)]) is None


def test_a_shortage_names_what_is_needed_the_limit_and_the_cure(golden):
    error = shortage(1512, [files(None), files(1024)])
    assert error is not None
    golden(error)


def in_a_process_of(limits: str, program: str) -> str:
    """Return what a Python program prints under limits that the shell has set."""
    argv = [
        "bash",
        "-c",
        f'{limits}; exec "$0" -c "$1"',
        sys.executable,
        textwrap.dedent(program),
    ]
    done = subprocess.run(
        argv, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_soft_limit_of_open_files_is_raised_to_what_the_hosts_take():
    shown = in_a_process_of(
        "ulimit -Sn 256; ulimit -Hn 5000",
        """
        import resource
        from distmagic.connection import capacity
        capacity.check(20, by_ssh_program=False)
        print(*resource.getrlimit(resource.RLIMIT_NOFILE))
        capacity.check(500, by_ssh_program=False)
        print(*resource.getrlimit(resource.RLIMIT_NOFILE))
        """,
    )
    before, after = (tuple(map(int, line.split())) for line in shown.splitlines())
    assert before == (256, 5000), "a limit that is high enough stays"
    assert after[1] == 5000
    assert 500 * BY_PARAMIKO.files < after[0] < 500 * BY_PARAMIKO.files + 200


def test_the_hard_limit_of_open_files_is_told():
    shown = in_a_process_of(
        "ulimit -n 300",
        """
        from distmagic.connection import capacity
        from distmagic.errors import SpecError
        try:
            capacity.check(128, by_ssh_program=True)
        except SpecError as error:
            print(error)
        """,
    )
    message, hint = shown.splitlines()
    needed = message.split()[5]
    assert message.startswith(f"128 hosts at once take {needed} open files")
    assert (
        128 * BY_SSH_PROGRAM.files
        < int(needed.replace(",", ""))
        < 128 * BY_SSH_PROGRAM.files + 200
    )
    assert hint.startswith(f"Run `ulimit -n {needed.replace(',', '')}`")


def test_threads_of_a_user_count_where_the_system_counts_them(monkeypatch, golden):
    """Root has no such limit, so that a user is played."""
    monkeypatch.setattr(capacity.os, "geteuid", lambda: 12345)
    monkeypatch.setattr(capacity.resource, "getrlimit", lambda _: (3000, 3000))
    monkeypatch.setattr(capacity, "_count_tasks", lambda: 40)
    error = shortage(512, [capacity._tasks_of_user(BY_PARAMIKO)])
    golden(error)
    monkeypatch.setattr(capacity.os, "geteuid", lambda: 0)
    assert shortage(512, [capacity._tasks_of_user(BY_PARAMIKO)]) is None


def test_the_threads_of_this_process_are_among_those_of_its_user():
    assert capacity._count_tasks() >= len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize(
    ("most", "has_room"), [("max", True), ("3200", True), ("3000", False), (None, True)]
)
def test_the_limit_of_a_container_counts(tmp_path, monkeypatch, most, has_room, golden):
    monkeypatch.setattr(capacity, "_CGROUPS", tmp_path)
    if most is not None:
        (tmp_path / "pids.max").write_text(f"{most}\n")
        (tmp_path / "pids.current").write_text("40\n")
    monkeypatch.setattr(capacity, "_own_cgroup", lambda: "")
    error = shortage(512, [capacity._tasks_of_cgroup(BY_PARAMIKO)])
    assert (error is None) == has_room
    if error is not None:
        golden(error)


def test_memory_that_is_not_there_is_told(monkeypatch, golden):
    monkeypatch.setattr(
        capacity, "_text", lambda _: "MemTotal: 999 kB\nMemAvailable:   80000 kB\n"
    )
    error = shortage(
        512, [capacity._memory(HostUsage(files=0, tasks=0, memory_mb=0.5))]
    )
    golden(error)


def test_a_session_looks_before_it_reaches_hosts(monkeypatch):
    asked: list[tuple[int, bool]] = []

    def refuse(hosts: int, *, by_ssh_program: bool) -> None:
        asked.append((hosts, by_ssh_program))
        raise SpecError("too many")

    def connect(*_: object) -> None:
        raise AssertionError("nothing is to be reached")

    monkeypatch.setattr(capacity, "check", refuse)
    session = Session(Connections(connect))
    for command in (None, "ssh"):
        with pytest.raises(SpecError, match="too many"):
            session.reach(
                parse_hosts("gpu-a,gpu-b,gpu-c"), Access(ssh_command=command), None
            )
    assert asked == [(3, False), (3, True)]
