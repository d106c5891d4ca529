"""Where a process waits for somebody to type, as `input` and debuggers say it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.waiting import HANG_S

HEAD = """\
import json, os, sys
from distmagic.remote.system import asking
told = []
asking.install(lambda *what: told.append(list(what)), lambda prompt: told.append(prompt))
"""


def told(tmp_path: Path, program: str, typed: str) -> list[object]:
    """Return what is told of a program that is typed to."""
    (tmp_path / "train.py").write_text(program)
    script = f"{HEAD}sys.path[:0] = [{str(tmp_path)!r}]\nimport train\nprint('\\n' + json.dumps(told))\n"
    done = subprocess.run(
        [sys.executable, "-c", script], input=typed, capture_output=True, text=True,
        check=True, timeout=HANG_S, cwd=Path(__file__).parents[4],
    )  # fmt: skip
    found: list[object] = json.loads(done.stdout.splitlines()[-1])
    for one in found:
        if isinstance(one, list):
            one[1] = os.path.relpath(one[1], tmp_path)
    return found


def test_input_says_where_it_waits_and_that_it_goes_on(tmp_path):
    program = "x = 1\nassert input('how many? ') == '7'\n"
    assert told(tmp_path, program, "7\n") == [[1, "train.py", 2, "how many? "], 1]


def test_a_debugger_waits_where_the_user_s_code_is(tmp_path):
    program = "def f(x):\n    import pdb; pdb.set_trace()\n    return x\nf(3)\n"
    waits, goes_on, *_ = told(tmp_path, program, "c\n")
    assert waits[1:] in (["train.py", 3, "(Pdb) "], ["train.py", 2, "(Pdb) "])
    assert goes_on == 1


def test_a_debugger_waits_where_its_user_looks(tmp_path):
    """In a library's function too, whose variables stay as the user sets them."""
    (tmp_path / "site-packages").mkdir()
    program = """\
import pdb, sys
sys.path.append(f"{sys.path[0]}/site-packages")
import library
def f():
    try:
        library.loads("[]")
    except ValueError:
        pdb.post_mortem(sys.exc_info()[2])
    assert pdb.runcall(library.dumps, "old") == "new"
f()
"""
    library = """\
def loads(text):
    raise ValueError
def dumps(text):
    text = text.lower()
    return text
"""
    (tmp_path / "site-packages" / "library.py").write_text(library)
    typed = "up\nq\nn\n!text = 'new'\np text\nc\n"
    places = [
        one[1:3] for one in told(tmp_path, program, typed) if one.__class__ is list
    ]
    assert places == [["train.py", 8], ["train.py", 8], *[["train.py", 9]] * 4]


def test_the_end_of_input_is_told_as_going_on(tmp_path):
    program = "try:\n    input()\nexcept EOFError:\n    pass\n"
    assert told(tmp_path, program, "") == [[1, "train.py", 2, ""], 1]


@pytest.mark.parametrize(
    "program",
    [
        "import io, sys\nsys.stdin = io.StringIO('mine\\n')\nassert input() == 'mine'\n",
        "import os\nif os.fork() == 0:\n    input()\n    os._exit(0)\nos.wait()\n",
    ],
)
def test_what_is_not_typed_for_this_process_is_not_told(tmp_path, program):
    assert told(tmp_path, program, "line\n") == []
