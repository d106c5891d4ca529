"""Which cells become a program, and what it looks like."""

from __future__ import annotations

import builtins
import collections
import json

import pytest

from distmagic.errors import UsageError
from distmagic.exports import cell_script
from distmagic.exports.cell_script import NoProgram
from distmagic.remote.values.by_name import is_secret
from distmagic.request.cells.cell import parse_cell


def written(cell: str, *, whole: bool = False, **names: object) -> str:
    plan = parse_cell(f"#%%distributed --export slurm d\n{cell}", whole=whole)
    return cell_script.of_cell(plan, names, {})


def test_a_cell_with_all_that_it_needs():
    cell = "import os\n\nLR = 0.1\n\ndef train(n):\n    return n * LR\n\ntrain(\n    3,\n)\n"
    assert written(cell) == (
        "import os\n\nLR = 0.1\n\ndef train(n):\n    return n * LR\n\n\n"
        'if __name__ == "__main__":\n    train(\n    3,\n)\n'
    )


def test_names_of_other_cells_are_imported_or_written_out():
    cell = "def train():\n    return j.dumps(Counter(SIZES)), NAME\ntrain()"
    found = written(cell, j=json, Counter=collections.Counter, SIZES=[1, 2], NAME="a'b")
    assert found == (
        'from collections import Counter\nimport json as j\n\nNAME = "a\'b"\nSIZES = [1, 2]\n\n\n'
        "def train():\n    return j.dumps(Counter(SIZES)), NAME\n\n\n"
        'if __name__ == "__main__":\n    train()\n'
    )


def test_display_of_a_notebook_prints(monkeypatch):
    monkeypatch.setattr("builtins.display", print, raising=False)
    found = written('def train():\n    display("a")\ntrain()')
    assert found.startswith(
        "display = print  # a notebook has it from the start\n\n\ndef train"
    )


def test_a_secret_of_the_notebook_is_not_written(golden):
    with golden.raises(UsageError):
        written("def train():\n    return HF_TOKEN\ntrain()", HF_TOKEN="hf_x")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *((name, True) for name in ("PGPASSWORD", "MYSQL_PWD", "DB_PASS", "SSHPASS", "OPENAI_APIKEY", "GITHUB_PAT",
                                    "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "tokens")),
        *((name, False) for name in ("PATH", "LR", "PATTERN", "AUTHOR", "TOKENIZER")),
    ],
)  # fmt: skip
def test_names_of_secrets(name, is_one):
    assert is_secret(name) == is_one


@pytest.mark.parametrize(
    ("cell", "end"),
    [
        ("def f(): pass", "    f()\n"),
        ("async def f(): pass", "    asyncio.run(f())\n"),
        ("def f(): pass\nrun = f()", "    run = f()\n"),
        ("async def f(): pass\nawait f()", "    asyncio.run(f())\n"),
        ("def f(): pass\n(f()\n .x)", "    (f()\n .x)\n"),
        ("def f(): pass\nif __name__ == '__main__':\n    f()  # here", "    f()  # here\n"),
    ],
)  # fmt: skip
def test_the_end_of_a_program(cell, end):
    found = written(cell)
    assert isinstance(found, str)
    assert found.endswith(f":\n{end}")
    compile(found, "x", "exec")


def test_a_cell_that_runs_whole_stays_as_it_is():
    cell = "import sys\nfor arg in sys.argv:\n    print(arg)\n"
    assert written(cell, whole=True) == cell


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("data = open('x')\ndef f(): pass\nf()", "line 2 is computed in the notebook"),
        ("print('here')\ndef f(): pass\nf()", "line 2 is computed in the notebook"),
        ("def f(): return model\nf()", "model is of another cell"),
        ("def f(): return absent\nf()", "nothing defines absent"),
        ("def f(): pass\nget_ipython().foo\nf()", "it has magics of IPython"),
        ("def f(): pass\nx = 1; f()", "its last line has several statements"),
    ],
)  # fmt: skip
def test_why_a_cell_is_no_program(cell, why):
    assert why_none(cell, model=object()) == why


def test_magics_are_found_where_they_are_built_in_and_not_in_comments(monkeypatch):
    """IPython has `get_ipython` among the built-in names while it runs a cell."""
    monkeypatch.setattr(builtins, "get_ipython", lambda: None, raising=False)
    cell = "def f(): get_ipython().system('nvidia-smi')\nf()"
    assert why_none(cell) == "it has magics of IPython"
    assert "print(1)" in written("# get_ipython().foo\nprint(1)", whole=True)


def test_an_import_of_the_future_that_would_no_longer_come_first():
    cell = "from __future__ import annotations\ndef f(): return N\nf()"
    assert "__future__" in why_none(cell, N=3)


def test_values_that_a_text_can_not_make():
    for value in (
        float("nan"),
        float("inf"),
        complex("inf"),
        {1: complex("nan")},
        [object()],
        set(),
        "x" * 3000,
        type("T", (int,), {})(3),
    ):
        assert why_none("def f(): return V\nf()", V=value) == "V is of another cell"


def why_none(cell: str, **names: object) -> str:
    with pytest.raises(NoProgram) as caught:
        written(cell, **names)
    return caught.value.why


FIRST = """
import json
import math as m

class Base:
    size = 2

def decorated(function):
    return function
"""
SECOND = """
class Model(Base):
    def area(self):
        return m.pi * self.size

@decorated
def helper(
    n,
):
    return json.dumps(n), again

def again():
    return helper(Model().area())
"""


def test_functions_and_classes_of_other_cells_stand_before_what_needs_them():
    names: dict[str, object] = {"__name__": "__main__"}
    for filename, text in (("one", FIRST), ("two", SECOND)):
        exec(compile(text, filename, "exec"), names)
    plan = parse_cell("#%%distributed --export slurm d\nagain()", whole=False)
    found = cell_script.of_cell(plan, names, {"one": FIRST, "two": SECOND})
    assert isinstance(found, str)
    assert found.startswith("import json\nimport math as m\n\n\n")
    order = [
        "class Base",
        "class Model(Base)",
        "def decorated",
        "@decorated\ndef helper",
        "def again",
        "if __name__",
    ]
    places = [found.index(words) for words in order]
    assert places[0] < places[1]
    assert places[2] < places[3]
    assert max(places) == places[-1]
    compile(found, "x", "exec")


def test_a_class_that_was_defined_again_is_the_later_one():
    names: dict[str, object] = {"__name__": "__main__"}
    texts = {"one": "class A:\n    x = 1\n", "two": "class A:\n    x = 2\n"}
    for filename, text in texts.items():
        exec(compile(text, filename, "exec"), names)
    plan = parse_cell("#%%distributed --export slurm d\nprint(A.x)", whole=False)
    found = cell_script.of_cell(plan, names, texts)
    assert "x = 2" in str(found)
    assert "x = 1" not in str(found)


TWICE = """
import functools

def twice(function):
    @functools.wraps(function)
    def call():
        return 2 * function()
    return call
"""


def exported(*cells: str, call: str = "f()") -> str:
    """Return the program of a cell that makes a call after these cells, whose files are "0", "1" and so on."""
    names: dict[str, object] = {"__name__": "__main__"}
    for number, text in enumerate(cells):
        exec(compile(text, str(number), "exec"), names)
    plan = parse_cell(f"#%%distributed --export slurm d\n{call}", whole=False)
    texts = {str(number): text for number, text in enumerate(cells)}
    return cell_script.of_cell(plan, names, texts)


@pytest.mark.parametrize(
    "cells",
    [
        ["def f():\n    return 1\n\ndef f():\n    return 2\n"],
        ["class f:\n    x = 1\n\nclass f:\n    x = 2\n"],
        ["def f():\n    return 1\n", "def f():\n    return 2\n"],
        # The wrapper's code is of the first cell, which has an `f` of its own.
        [TWICE + "def f():\n    return 1\n", "@twice\ndef f():\n    return 2\n"],
    ],
)
def test_the_last_definition_of_a_name_is_exported(cells):
    found = exported(*cells)
    before, _, _ = found.partition("if __name__")
    assert before.rstrip().endswith(("return 2", "x = 2"))
    assert "return 1" not in found
    assert "x = 1" not in found


def test_an_earlier_definition_that_is_still_in_use_is_exported():
    cell = "def f():\n    return 1\nfirst = f\ndef f():\n    return 2\nf = first\n"
    assert "return 1" in exported(cell)


@pytest.mark.parametrize(
    "cell",
    [
        "if 1 > 2:\n    def f():\n        return 1\nelse:\n    def f():\n        return 2\n",
        "try:\n    from absent import f\nexcept ImportError:\n    class f:\n        x = 2\n",
        "def f():\n    return 1\nif 2 > 1:\n    def f():\n        return 2\n",
        TWICE + "def f():\n    return 1\nf = twice(f)\n",
    ],
)
def test_a_definition_that_has_a_condition_or_was_replaced_is_no_program(cell, golden):
    with golden.raises(NoProgram):
        exported(cell)


def test_what_a_definition_evaluates_at_once_stands_before_it_though_the_cell_has_it_too():
    first = "import dataclasses\nLR = 1\n@dataclasses.dataclass\nclass Net:\n    lr: int = LR\n"
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(first, "one", "exec"), names)
    plan = parse_cell(
        "#%%distributed\nimport dataclasses\nLR = 1\ndef train():\n    return Net()\ntrain()",
        whole=False,
    )
    program = cell_script.of_cell(plan, names, {"one": first})
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
