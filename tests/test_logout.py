"""What survives log-out, decided from what hosts say of themselves, and asked of hosts that say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from distmagic.remote import logout
from distmagic.remote.logout import Session, decide

SCOPE = "0::/user.slice/user-1000.slice/session-5.scope\n"
PREFIX = ("systemd-run", "--user", "--scope", "--quiet", "--collect", "--")


@pytest.mark.parametrize(
    ("session", "prefix"),
    [
        (Session(cgroup=""), ()),
        (Session(cgroup="0::/system.slice/ssh.service\n", kills=True), ()),
        (Session(cgroup=SCOPE), ()),
        (Session(cgroup=SCOPE, kills=True, lingers=True, has_scopes=True), PREFIX),
        (Session(cgroup="0::/user.slice/user-1000.slice/user@1000.service/app.slice/x.scope\n", kills=True), ()),
    ],
)
def test_what_is_put_in_front(session, prefix):
    assert decide(session) == prefix


@pytest.mark.parametrize("more", [{}, {"lingers": True}, {"has_scopes": True}])
def test_systemd_that_kills_is_named_with_its_cure(more):
    with pytest.raises(PermissionError) as caught:
        decide(Session(cgroup=SCOPE, kills=True, **more))
    assert str(caught.value) == (
        "systemd ends here what a user leaves running at log-out (KillUserProcesses=yes), so no job can be left alone. "
        "Run it without --detach, or have it allowed with: loginctl enable-linger"
    )


def test_a_session_that_slurm_has_adopted_is_named():
    with pytest.raises(PermissionError) as caught:
        decide(Session(cgroup="0::/system.slice/slurmstepd.scope/job_123/step_extern/user/task_0\n"))
    assert str(caught.value) == (
        "what is started here ends with Slurm job 123 (pam_slurm_adopt), so no job can be left alone. "
        "Run it without --detach, or submit it to Slurm"
    )


@pytest.mark.parametrize(("says", "expected"), [("b true", True), ("b false", False), ("", False)])
def test_systemd_is_asked(says, expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The programs' words are those of systemd 252; there is no systemd where tests run."""
    for name, words in (("busctl", says), ("loginctl", "yes"), ("systemd-run", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {words}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(Path, "read_text", lambda *_: SCOPE)
    found = logout._look()
    assert (found.kills, found.lingers, found.has_scopes) == (expected, True, True)


def test_a_host_without_systemd_kills_nothing():
    assert logout.survivor_prefix() == ()
