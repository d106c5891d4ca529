"""The limit of open files, raised before hosts are reached: what is too low for them, and the cure."""

from __future__ import annotations

import sys
import textwrap

import pytest

from distmagic.connection import capacity
from distmagic.connection.capacity import BY_PARAMIKO, BY_SSH_PROGRAM
from distmagic.connection.connections import Connections
from distmagic.errors import UsageError
from distmagic.request.access import Access
from distmagic.request.hosts import parse_hosts
from distmagic.session.session import Session
from tests import REPOSITORY
from tests.builders.shell import completed


def in_a_process_of(limits: str, program: str) -> str:
    """Return what a Python program prints under limits that the shell has set."""
    argv = [
        "bash",
        "-c",
        f'{limits}; exec "$0" -c "$1"',
        sys.executable,
        textwrap.dedent(program),
    ]
    done = completed(argv, cwd=REPOSITORY, check=False)
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
    assert 500 * BY_PARAMIKO < after[0] < 500 * BY_PARAMIKO + 200


def test_the_hard_limit_of_open_files_is_told():
    shown = in_a_process_of(
        "ulimit -n 300",
        """
        from distmagic.connection import capacity
        from distmagic.errors import UsageError
        try:
            capacity.check(128, by_ssh_program=True)
        except UsageError as error:
            print(error)
        """,
    )
    message, hint = shown.splitlines()
    needed = message.split()[5]
    assert message.startswith(f"128 hosts at once take {needed} open files")
    assert (
        128 * BY_SSH_PROGRAM < int(needed.replace(",", "")) < 128 * BY_SSH_PROGRAM + 200
    )
    assert hint.startswith(f"Run `ulimit -n {needed.replace(',', '')}`")


def test_a_session_looks_before_it_reaches_hosts(monkeypatch):
    asked: list[tuple[int, bool]] = []

    def refuse(hosts: int, *, by_ssh_program: bool) -> None:
        asked.append((hosts, by_ssh_program))
        raise UsageError("too many")

    def connect(*_: object) -> None:
        raise AssertionError("nothing is to be reached")

    monkeypatch.setattr(capacity, "check", refuse)
    session = Session(Connections(connect))
    for command in (None, "ssh"):
        with pytest.raises(UsageError, match="too many"):
            session.reach(
                parse_hosts("gpu-a,gpu-b,gpu-c"), Access(ssh_command=command), None
            )
    assert asked == [(3, False), (3, True)]
