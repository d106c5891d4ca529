"""What stands before a host's Python: run by a real bash, as a host would."""

from __future__ import annotations

import subprocess

import pytest

from distmagic.errors import SpecError
from distmagic.request.command_prefix import (
    SETUP_FAILED,
    interpreter_words,
    words_before_python,
)
from distmagic.request.spec import Access
from distmagic.transports.quoting import command_line

ASK = ("sh", "-c", "cat; printf '%s\\n' \"$A\"")


def ran(setup: str, prefix: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program behind these words, by the command line that SSH would give to a log-in shell."""
    line = command_line((*words_before_python(setup, prefix), *ASK))
    return subprocess.run(
        ["/bin/sh", "-c", line],
        input="in\n",
        capture_output=True,
        text=True,
        check=False,
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
    ],
)
def test_the_program_gets_the_variables_that_the_shell_sets(setup, value):
    done = ran(setup)
    assert (done.returncode, done.stdout) == (0, f"in\n{value}\n")


def test_what_the_shell_says_is_not_taken_for_the_programs_words_nor_its_input_read():
    done = ran("echo hello; cat; export A=1")
    assert done.stdout == "in\n1\n"
    assert done.stderr == "hello\n"


@pytest.mark.parametrize(
    "setup", ["false", "nonsense --here", "export A=1; exit 3", "if"]
)
def test_a_shell_that_fails_starts_nothing(setup):
    done = ran(setup)
    assert done.stdout == ""
    assert done.returncode == (3 if "exit" in setup else SETUP_FAILED)


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
        "/bin/sh",
        "-c",
        line,
    ]
    done = subprocess.run(shell, capture_output=True, text=True, check=True, cwd="/")
    said = done.stdout.splitlines()
    assert said[-1] == "-u a b"
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


def test_what_no_host_could_be_told_is_refused_here():
    with pytest.raises(SpecError, match="--exec-prefix can't be split into words"):
        Access(exec_prefix="a 'b")
    with pytest.raises(SpecError, match="--setup has a zero byte"):
        Access(setup="a\0b")
    with pytest.raises(SpecError, match="no shell knows what ~ is"):
        Access(setup="x", pythons=(("", "~/venv/bin/python"),))
