"""What survives log-out, decided from what hosts say of themselves, and asked of hosts that say it.

The words are those of systemd 252, as tests/e2e/test_systemd.py hears them from a real one.
"""

from __future__ import annotations

import getpass
import shlex
from pathlib import Path

import pytest

from distmagic.remote.system import logout
from distmagic.remote.system.logout import LogInSession, decide

SCOPE = "0::/user.slice/user-1000.slice/session-5.scope\n"
PREFIX = (
    "systemd-run",
    "--user",
    "--scope",
    "--quiet",
    "--collect",
    "-p",
    "OOMPolicy=continue",
    "--",
)
OLD_PREFIX = (*PREFIX[:5], "--")
KILLS = "b true\nas 0\nas 0"


@pytest.mark.parametrize(
    ("session", "prefix"),
    [
        (LogInSession(cgroup=""), ()),
        (LogInSession(cgroup="0::/system.slice/ssh.service\n", kills=True), ()),
        (LogInSession(cgroup=SCOPE), ()),
        (LogInSession(cgroup=SCOPE, kills=True, lingers=True, scope=PREFIX), PREFIX),
        (LogInSession(cgroup="0::/user.slice/user-1000.slice/user@1000.service/app.slice/x.scope\n", kills=True), ()),
    ],
)  # fmt: skip
def test_what_is_put_in_front(session, prefix):
    assert decide(session) == prefix


@pytest.mark.parametrize("more", [{}, {"scope": PREFIX}, {"lingers": True}])
def test_systemd_that_kills_is_named_with_its_cure(more, golden):
    with golden.raises(PermissionError):
        decide(LogInSession(cgroup=SCOPE, user="ann", kills=True, **more))


def test_a_session_that_slurm_has_adopted_is_named(golden):
    with golden.raises(PermissionError):
        decide(
            LogInSession(
                cgroup="0::/system.slice/slurmstepd.scope/job_123/step_extern/user/task_0\n"
            )
        )


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets what this host's systemd says in a session: manager, lingering, scopes that begin."""

    def say(
        manager: str,
        *,
        lingers: str = "b true",
        scopes: tuple[tuple[str, ...], ...] = (PREFIX, OLD_PREFIX),
    ) -> None:
        login1 = "--system get-property org.freedesktop.login1 /org/freedesktop/login1"
        properties = "org.freedesktop.login1.Manager KillUserProcesses KillOnlyUsers KillExcludeUsers"
        program(
            "busctl",
            {
                f"{login1} {properties}": manager,
                f"{login1}/user/self org.freedesktop.login1.User Linger": lingers,
            },
        )
        program("systemd-run", {" ".join((*scope[1:], "true")): "" for scope in scopes})
        logout._kills.cache_clear()

    def program(name: str, answers: dict[str, str]) -> None:
        cases = "".join(
            f"{shlex.quote(asked)}) echo {shlex.quote(words)};;\n"
            for asked, words in answers.items()
        )
        (tmp_path / name).write_text(
            f'#!/bin/sh\ncase "$*" in\n{cases}*) exit 1;;\nesac\n'
        )
        (tmp_path / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: SCOPE)
    monkeypatch.setattr(logout, "_user", lambda: "ann")
    yield say
    logout._kills.cache_clear()


@pytest.mark.parametrize(
    ("manager", "kills"),
    [
        ("b false\nas 0\nas 0", False),
        (KILLS, True),
        ('b true\nas 0\nas 1 "ann"', False),
        ('b true\nas 0\nas 2 "root" "bob"', True),
        ('b false\nas 1 "ann"\nas 0', True),
        ('b true\nas 1 "bob"\nas 0', False),
        ('b true\nas 1 "ann"\nas 1 "ann"', False),
        ("", False),
        ("b true", False),
    ],
)
def test_whom_systemd_kills(says, manager, kills):
    says(manager)
    assert logout._look() == (
        LogInSession(cgroup=SCOPE, user="ann", kills=True, lingers=True, scope=PREFIX)
        if kills
        else LogInSession(cgroup=SCOPE)
    )


def test_root_is_excluded_where_nobody_is(says, monkeypatch):
    monkeypatch.setattr(logout, "_user", lambda: "root")
    says(KILLS)
    assert logout.survivor_prefix() == ()
    says('b true\nas 0\nas 1 "ann"')
    assert logout.survivor_prefix() == PREFIX


def test_an_older_systemd_knows_no_policy_for_scopes(says):
    says(KILLS, scopes=(OLD_PREFIX,))
    assert logout.survivor_prefix() == OLD_PREFIX
    says(KILLS, scopes=())
    with pytest.raises(PermissionError, match="systemd-run --user --scope"):
        logout.survivor_prefix()
    assert logout.survivor_prefix(must=False) == ()


def test_a_host_that_ends_runs_with_their_connection_warns_of_it(says, golden):
    says(KILLS)
    assert logout.warning() == ""
    says(KILLS, lingers="b false")
    golden(logout.warning())


def test_a_host_without_systemd_kills_nothing():
    assert (logout.survivor_prefix(), logout.warning()) == ((), "")


def test_the_user_is_who_runs_this():
    assert logout._user() == getpass.getuser()
