"""What stands before a host's Python: run by a real bash, as a host would."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from distmagic.errors import UsageError
from distmagic.request import command_prefix
from distmagic.request.access import Access
from distmagic.request.command_prefix import (
    SETUP_FAILED,
    interpreter_words,
    setup_line,
    words_before_python,
)
from distmagic.transports.quoting import command_line
from tests.builders.shell import completed

ASK = ("sh", "-c", "cat; printf '%s\\n' \"$A\"")


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, in which the variables of setups are kept."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DISTMAGIC_HOME", raising=False)
    return tmp_path / ".distmagic" / "setup"


def ran(setup: str, prefix: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program behind these words, by the command line that SSH would give to a log-in shell."""
    line = command_line((*words_before_python(setup, prefix), *ASK))
    return completed(
        ["/bin/sh", "-c", line], input=f"{setup_line(setup).decode()}in\n", check=False
    )


@pytest.mark.parametrize(
    ("setup", "value"),
    [
        ("export A=1", "1"),
        ("export A='it is'", "it is"),
        ('export A="a\\\\b$((1+1))!"', "a\\b2!"),
        ("A=x\nexport A\n", "x"),
        ("f() { export A=f; }\nf", "f"),
        ('export A="\'"; # a comment', "'"),
        ("set -eu; IFS=x; export A=$'1\\n 2'", "1\n 2"),
        ("A() { echo of a function; }; export -f A; export A=`bash -c A`", "of a function"),
        ("export A=é", "é"),
    ],
)  # fmt: skip
def test_the_program_gets_the_variables_that_the_shell_sets(setup, value):
    for _ in range(2):  # the second time they are those that were kept
        done = ran(setup)
        assert (done.returncode, done.stdout) == (0, f"in\n{value}\n"), done.stderr


def test_what_the_shell_says_is_not_taken_for_the_programs_words_nor_its_input_read():
    done = ran("echo hello; cat; export A=1")
    assert done.stdout == "in\n1\n"
    assert done.stderr == "hello\n"


def test_a_setup_runs_once_for_each_text_and_only_its_changes_are_kept(
    kept, monkeypatch
):
    monkeypatch.setenv("GOES", "1")
    monkeypatch.setenv("STAYS", "of this connection")
    setup = "echo ran; export A=1; unset GOES; export PATH=/opt/x:$PATH; cd /; umask 0"
    program = "env", "B=2"
    assert ran(setup, " ".join(program)).stderr == "ran\n"
    assert ran(setup).stderr == ""
    (file,) = kept.glob("[!.]*")
    assert file.stat().st_mode & 0o777 == 0o600
    assert kept.stat().st_mode & 0o777 == 0o700
    assert sorted(file.read_text().splitlines()) == [
        "export A=1",
        f"export PATH=/opt/x:{os.environ['PATH']}",
        "unset GOES",
    ]
    assert ran(f"{setup} ").stderr == "ran\n"  # another text
    old = time.time() - 13 * 3600
    os.utime(file, (old, old))
    assert ran(setup).stderr == "ran\n"
    assert len(list(kept.glob("[!.]*"))) == 2


@pytest.mark.parametrize("how", ["export n=5 t=6 was=7", "set -a; n=5 t=6 was=7"])
def test_variables_of_any_name_keep_the_values_of_the_setup_or_of_the_connection(
    how, kept, monkeypatch
):
    for name in "udbflr":
        monkeypatch.setenv(name, f"of the connection {name}")
    for _ in range(2):  # the second time they are those that were kept
        done = ran(how, """sh -c 'A="$n $t $was $u $d $b $f $l $r" exec "$@"' sh""")
        of_connection = " ".join(f"of the connection {name}" for name in "udbflr")
        assert done.stdout == f"in\n5 6 7 {of_connection}\n", done.stderr
    (file,) = kept.glob("[!.]*")
    assert sorted(file.read_text().splitlines()) == [
        "export n=5",
        "export t=6",
        "export was=7",
    ]


def test_no_secret_is_on_the_command_line():
    words = words_before_python("export KEY=abc123", "")
    assert "abc123" not in " ".join(words)
    # A shell such as csh takes no longer word.
    assert max(map(len, words)) < 3000


@pytest.mark.parametrize(
    "setup", ["false", "nonsense --here", "export A=1; exit 3", "if", "exit 0"]
)
def test_a_shell_that_fails_starts_nothing_and_keeps_nothing(setup, kept):
    for _ in range(2):
        done = ran(setup)
        assert (done.returncode, done.stdout) == (SETUP_FAILED, "")
    assert list(kept.glob("[!.]*")) == []


def test_a_setup_does_its_work_where_the_home_takes_no_file(tmp_path, monkeypatch):
    """Else a host whose disk is full could not even be asked to stop a job."""
    (tmp_path / ".distmagic").write_text("in the way of the folder")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    for _ in range(2):
        done = ran("echo ran; export A=1")
        assert (done.stdout, done.stderr) == ("in\n1\n", "ran\n")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_variables_that_a_full_disk_does_not_take_are_not_kept(kept, monkeypatch):
    setup = "export A=1 B=2"
    monkeypatch.setattr(
        command_prefix,
        "_KEPT_SETUP",
        command_prefix._KEPT_SETUP.replace('>"$1"', ">/dev/full"),
    )
    done = ran(setup)
    assert (done.returncode, done.stdout) == (SETUP_FAILED, "")
    assert "No space left on device" in done.stderr
    assert list(kept.glob("[!.]*")) == []


def test_an_empty_file_of_variables_is_none(kept):
    assert ran("export A=1").stdout == "in\n1\n"
    (file,) = kept.glob("[!.]*")
    file.write_bytes(b"")
    assert ran("export A=1").stdout == "in\n1\n"
    assert file.stat().st_size > 0


def test_a_setup_that_takes_too_long_is_ended(kept, monkeypatch):
    monkeypatch.setattr(
        command_prefix, "_KEPT_SETUP", command_prefix._KEPT_SETUP.replace("300", "0.2")
    )
    done = ran("while :; do :; done")
    assert done.returncode == SETUP_FAILED
    assert done.stderr == "it took longer than 0.2 s\n"
    assert list(kept.glob("[!.]*")) == []


def test_a_prefix_starts_the_program():
    assert words_before_python("", "apptainer exec --nv 'my image.sif'") == (
        "apptainer", "exec", "--nv", "my image.sif",
    )  # fmt: skip
    assert ran("export A=1", "env A=2").stdout == "in\n2\n"
    assert words_before_python("  \n", "") == ()


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("work/venv", "work/venv"),
        ("work/venv", "~/work/venv/"),
        ("project/.venv", "project"),
        (".virtualenvs/train", "train"),
        ("miniforge3/envs/my train", "my train"),
    ],
)
def test_an_environment_is_found_by_its_name_or_folder(tmp_path, place, name):
    is_conda = "miniforge3" in place
    there = tmp_path / place
    (there / "bin").mkdir(parents=True)
    (there / "bin" / "python").write_text('#!/bin/sh\nenv; echo "$@"\n')
    (there / "bin" / "python").chmod(0o755)
    if is_conda:
        (there / "conda-meta").mkdir()
    line = command_line((*interpreter_words(f"env:{name}"), "-u", "a b"))
    shell = [
        "env",
        "-i",
        f"HOME={tmp_path}",
        "PATH=/usr/bin:/bin",
        "e=of the user",
        "/bin/sh",
        "-c",
        line,
    ]
    done = subprocess.run(shell, capture_output=True, text=True, check=True, cwd="/")
    said = done.stdout.splitlines()
    assert said[-1] == "-u a b"
    assert "e=of the user" in said
    assert f"PATH={there}/bin:/usr/bin:/bin" in said
    assert f"{'CONDA_PREFIX' if is_conda else 'VIRTUAL_ENV'}={there}" in said


def test_an_environment_that_is_not_there_says_where_it_was_looked_for(tmp_path):
    line = command_line((*interpreter_words("env:none"), "-u"))
    shell = [
        "env",
        "-i",
        f"HOME={tmp_path}",
        "PATH=/usr/bin:/bin",
        "/bin/sh",
        "-c",
        line,
    ]
    done = subprocess.run(shell, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 127
    assert done.stderr.startswith("no environment of this name in none ")
    assert f"{tmp_path}/miniconda3/envs/none" in done.stderr
    assert interpreter_words("/usr/bin/python3") == ("/usr/bin/python3",)


def test_what_no_host_could_be_told_is_refused_here(golden):
    with golden.raises(UsageError):
        Access(exec_prefix="a 'b")
    with golden.raises(UsageError):
        Access(setup="a\0b")
    with golden.raises(UsageError):
        Access(setup="x", pythons=(("", "~/venv/bin/python"),))
