"""What a dry run of a script shows: where ranks would begin, and what they would run there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import UsageError
from distmagic.request import flags
from distmagic.request.access import Access
from distmagic.request.flags import split_program
from distmagic.session import programs
from distmagic.session import session as sessions
from distmagic.session.session import Session
from tests.builders.hosts import FakeHost, connector

HOST = FakeHost("gpu-a")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        "project/train.py",
        "project/src/deep.py",
        "project/nb/x",
        "other/far.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session that reaches one fake host."""
    monkeypatch.setattr(sessions, "connect", connector(HOST))
    made = Session()
    yield made
    made.close()


def shown(session: Session, line: str) -> str:
    """Return the command that a dry run shows, without torchrun's own part."""
    words, program = split_program(flags.split(line))
    request = flags.parse_words(words, flags.Defaults())
    text = programs.dry_run(
        session, request, program, (HOST.host,), Access(), NotebookAsker(can_ask=False)
    )
    command = text.splitlines()[-1]
    return (
        command.partition(" && ")[0]
        + " && "
        + command.rpartition("--master-port")[2].partition(" ")[2]
    )


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("train.py 50", "cd ~/.distmagic/work/train && train.py 50"),
        ("src/deep.py", "cd ~/.distmagic/work/deep && src/deep.py"),
        ("../other/far.py", "cd ~/.distmagic/work/far && far.py"),
        ("--name mine -m pkg.mod 7", "cd ~/.distmagic/work/mine && -m pkg.mod 7"),
        ("--cwd /data train.py", "cd /data && train.py"),
    ],
)
def test_a_dry_run_of_a_script_shows_where_it_would_run(
    session, project, line, command
):
    assert shown(session, line) == command


def test_a_dry_run_below_the_folder_that_travels_begins_there_too(
    session, project, monkeypatch
):
    (project / "nb" / "look.py").write_text("")
    monkeypatch.chdir(project / "nb")
    assert (
        shown(session, "--sync .. look.py") == "cd ~/.distmagic/work/look/nb && look.py"
    )
    absolute = f"--sync .. {project}/nb/look.py"
    assert shown(session, absolute) == "cd ~/.distmagic/work/look/nb && look.py"


def test_a_dry_run_of_a_script_that_is_not_there_says_so(session, project):
    with pytest.raises(UsageError, match=r"nothing\.py"):
        shown(session, "nothing.py")
