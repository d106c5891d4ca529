"""What stands before a host's Python: run by a real bash, as a host would."""

from __future__ import annotations

import subprocess

import pytest

from distmagic.errors import SpecError
from distmagic.request.command_prefix import SETUP_FAILED, words_before_python
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


def test_what_no_host_could_be_told_is_refused_here():
    with pytest.raises(SpecError, match="--exec-prefix can't be split into words"):
        Access(exec_prefix="a 'b")
    with pytest.raises(SpecError, match="--setup has a zero byte"):
        Access(setup="a\0b")
    with pytest.raises(SpecError, match="no shell knows what ~ is"):
        Access(setup="x", pythons=(("", "~/venv/bin/python"),))
