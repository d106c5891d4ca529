"""`%distributed jobs | attach | add | stop | clean`, over a fake session."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from distmagic.errors import SpecError
from distmagic.notebook.job_commands import table
from distmagic.planning.jobs import Job
from distmagic.remote.wire.protocol import JobTerms, KeptWorkDir
from tests.unit.notebook.fakes import Lab

ESCAPE = "\x1b]52;c;AAAA\x07"  # has a terminal write to the clipboard
MINE = f"{socket.gethostname()}:/me.ipynb"

TERMS = JobTerms(lease_s=60.0, owner=MINE, min_nodes=2)
ENDED = Job(
    name="mine", hosts=("gpu-a", "gpu-b"), host_indices=(0, 1), running=(), began_s=0.0, terms=TERMS, is_detached=False,
    reason="done", size_bytes=10**6, age_s=1.0,
)  # fmt: skip
THEIRS = replace(ENDED, name="theirs", terms=replace(TERMS, owner="laptop:/you.ipynb"))
RUNNING = replace(ENDED, name="busy", running=(0, 1), reason="", terms=replace(TERMS, max_nodes=3))


@pytest.fixture
def jobs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("JPY_SESSION_NAME", "/me.ipynb")
    lab.session.found = (ENDED, THEIRS, RUNNING)
    lab.value("%distributed hosts gpu-a gpu-b")
    lab.session.log.clear()
    return lab


def test_the_table_names_the_owner():
    rows = table(
        [ENDED, THEIRS, replace(ENDED, name="script", terms=replace(TERMS, owner=""))], 60.0, MINE
    ).splitlines()
    assert [row.split("1.0 MB")[1].strip() for row in rows[1:]] == ["this notebook", "laptop:/you.ipynb", ""]


def test_clean_all_takes_what_this_notebook_began(jobs, capsys):
    capsys.readouterr()
    jobs.value("%distributed clean all")
    shown = capsys.readouterr().out
    assert "remove mine" in jobs.session.log
    assert "theirs" not in shown
    assert shown.endswith(
        "removed: 1.5 MB\n1 ended job of other notebooks left; %distributed clean all --everybody removes these too.\n"
    )


def test_clean_all_of_everybody(jobs, capsys):
    capsys.readouterr()
    jobs.value("%distributed clean all --everybody")
    assert "remove mine theirs" in jobs.session.log
    assert capsys.readouterr().out.endswith("removed: 2.5 MB\n")


def test_a_job_of_somebody_else_can_be_named(jobs):
    jobs.value("%distributed clean theirs")
    assert "remove theirs" in jobs.session.log
    assert "clear" not in jobs.session.log


def test_clean_alone_removes_nothing_and_tells_what_all_would_leave(jobs, capsys):
    capsys.readouterr()
    jobs.value("%distributed clean")
    assert [entry for entry in jobs.session.log if entry != "reach"] == ["measure"]
    assert capsys.readouterr().out.endswith(
        "kept of what was sent for jobs that are over: 0.5 MB\n"
        "Remove all of it with %distributed clean all, or one job with %distributed clean ID.\n"
        "That leaves 1 ended job of other notebooks; %distributed clean all --everybody removes these too.\n"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("clean busy", "Job busy still runs.\n%distributed stop busy ends it."),
        (
            "clean mine --everybody",
            "%distributed clean takes the name of one job, or all.\n%distributed alone lists all commands.",
        ),
        ("stop mine", "Job mine has ended already (done)."),
        ("attach", "%distributed attach needs the name of a job.\n%distributed alone lists all commands."),
    ],
)
def test_a_wrong_command_about_jobs(jobs, line, message):
    error = jobs.error(f"%distributed {line}")
    assert isinstance(error, SpecError)
    assert str(error) == message


def test_an_attached_run_that_gets_a_name_is_no_value(jobs):
    assert jobs.value("%distributed attach mine") == "the run of mine"
    assert jobs.value("%distributed attach mine seen") is None
    assert jobs.shell.user_ns["seen"] == "the run of mine"


def test_what_hosts_told_is_no_escape_sequence_in_a_terminal(jobs, capsys):
    jobs.session.found = (replace(RUNNING, name=f"busy{ESCAPE}", hosts=("gpu-a", f"gpu-b{ESCAPE}")),)
    capsys.readouterr()
    jobs.value("%distributed stop busy")
    jobs.value("%distributed add busy gpu-c")
    jobs.value("%distributed jobs")
    shown = capsys.readouterr().out
    assert "busy was stopped on gpu-a, gpu-b\ngpu-c has come to busy as node 2;" in shown
    assert "\x1b" not in shown
    assert "AAAA" not in shown


def test_clean_tells_of_working_directories_and_all_takes_this_notebooks_own(jobs, capsys):
    def kept(name: str, origin: str, *, is_used: bool = False) -> KeptWorkDir:
        return KeptWorkDir(name=name, origin=origin, size_bytes=12_345_678, age_s=600.0, is_used=is_used)

    jobs.session.dirs = (kept("me", MINE), kept("busy", MINE, is_used=True), kept("x", "there:/x"))
    jobs.value("%distributed clean")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("working directory")]
    assert lines == [
        "working directory that no job uses: ~/.distmagic/work/me on gpu-a (12.3 MB, last used 10 min ago)",
        "working directory that no job uses: ~/.distmagic/work/x on gpu-a (12.3 MB, last used 10 min ago)",
    ]
    jobs.value("%distributed clean all")
    assert "removed with all files in it: ~/.distmagic/work/me on gpu-a (12.3 MB, " in capsys.readouterr().out
    jobs.value("%distributed clean all --everybody")
    assert [line for line in jobs.session.log if line.startswith("rmdir")] == ["rmdir me", "rmdir me x"]
