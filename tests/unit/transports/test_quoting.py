"""Words of a command line, read back by every log-in shell."""

import json
import sys

import pytest

from distmagic.transports.quoting import command_line, quote
from tests.builders.shell import completed

HOSTILE = (
    "plain", "a b", "", "it's", "a\\b", "a\\\\b", "\\", "!x", "a!b", "!!", "\\!", "$HOME", "`id`", "$(id)", "~", "~/x",
    "*", "?", "[a]", "{a,b}", "#c", "=ls", "%self", "%1", "^", "a^b", ";", "&&", "|", "<", ">", '"', "\t", "é ü", "-n",
    "--flag=x y", "a\\'b", "\\n", "(", "a'!\\'b", "x" * 3000,
)  # fmt: skip
SHELLS = (
    "sh",
    "bash",
    pytest.param("fish", marks=pytest.mark.needs("fish")),
    pytest.param("csh", marks=pytest.mark.needs("csh")),
)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_log_in_shell_reads_the_same_words(shell):
    line = command_line(
        (
            sys.executable,
            "-c",
            "import json,sys; print(json.dumps(sys.argv[1:]))",
            *HOSTILE,
        )
    )
    shown = completed([shell, "-c", line])
    assert tuple(json.loads(shown.stdout)) == HOSTILE


@pytest.mark.parametrize("shell", SHELLS)
def test_home_is_expanded_in_the_program_only(shell, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    program = tmp_path / "my bin" / "show"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho $1\n")
    program.chmod(0o755)
    line = command_line(("~/my bin/show", "~/x"))
    assert completed([shell, "-c", line]).stdout == "~/x\n"


def test_a_plain_line_stays_readable():
    assert (
        command_line(("python3", "-u", "/a/b.py", "x=1"))
        == "exec python3 -u /a/b.py 'x=1'"
    )


@pytest.mark.parametrize("word", ["a\nb", "a\rb", "a\0b"])
def test_a_line_break_can_not_be_quoted(word, golden):
    with golden.raises(ValueError):
        quote(word)


def test_no_program_is_an_error():
    for argv in ((), ("",)):
        with pytest.raises(ValueError, match="a command needs a program"):
            command_line(argv)
