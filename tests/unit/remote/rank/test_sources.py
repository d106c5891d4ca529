"""The text of a cell, as a rank's own code finds it."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.builders.shell import completed

CELL = "/tmp/ipykernel_71/123.py"
OTHER = "/tmp/ipykernel_71/456.py"
TEXT = """\
#%%distributed
import functools
from dataclasses import dataclass

class Data:
    def rows(self):
        return [1]

@dataclass
class Config:
    lr: float = 0.1

class Wrapped:
    @classmethod
    @functools.lru_cache
    def make(cls):
        return cls()

class Outer:
    class Inner:
        @property
        def size(self):
            return 3

class Borrowed:
    helper = helper

def train():
    return Data().rows()
"""
OTHER_TEXT = "def helper():\n    return 4\n"
RANK = """
import inspect, sys, types
from pathlib import Path
from distmagic.remote.rank import sources
labels = sources.load(Path(sys.argv[1]))
main = sys.modules["__main__"] = types.ModuleType("__main__")
main.__file__ = "/somewhere/distmagic_main.py"
import linecache
for name in ({other!r}, {cell!r}):
    exec(compile("".join(linecache.getlines(name)), name, "exec"), vars(main))
for name in sys.argv[2:]:
    print(inspect.getsource(eval(name, vars(main))), end="---\\n")
"""


def zipped_texts(folder: Path) -> Path:
    code = folder / "code.zip"
    with zipfile.ZipFile(code, "w") as archive:
        texts = {CELL: TEXT, OTHER: OTHER_TEXT}
        archive.writestr(
            "sources.json", json.dumps({"texts": texts, "labels": {CELL: "Cell In[3]"}})
        )
    return code


def sources_of(folder: Path, *names: str) -> str:
    script = RANK.format(cell=CELL, other=OTHER)
    done = completed([sys.executable, "-c", script, str(zipped_texts(folder)), *names], check=False, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("train", "def train():\n    return Data().rows()\n"),
        ("Data", "class Data:\n    def rows(self):\n        return [1]\n"),
        ("Data.rows", "    def rows(self):\n        return [1]\n"),
        ("Config", "@dataclass\nclass Config:\n    lr: float = 0.1\n"),
        ("Wrapped", TEXT[TEXT.index("class Wrapped") : TEXT.index("\nclass Outer")]),
        ("Outer", TEXT[TEXT.index("class Outer") : TEXT.index("\nclass Borrowed")]),
        ("Outer.Inner", TEXT[TEXT.index("    class Inner") : TEXT.index("\nclass Borrowed")]),
        ("Borrowed", "class Borrowed:\n    helper = helper\n"),
        ("helper", OTHER_TEXT),
    ],
)  # fmt: skip
def test_the_source_of_what_a_cell_defines_is_found(name, source, tmp_path):
    assert sources_of(tmp_path, name) == f"{source}---\n"


JIT = """
import sys, types, warnings
from pathlib import Path
from distmagic.remote.rank import sources
sources.load(Path(sys.argv[1]))
main = sys.modules["__main__"] = types.ModuleType("__main__")
main.__file__ = "/somewhere/distmagic_main.py"
import torch
text = '''
import torch
class Pair:
    def __init__(self, a: int, b: int):
        self.a = a
        self.b = b
    def total(self) -> int:
        return self.a + self.b
def double(x: int) -> int:
    return 2 * Pair(x, x).total()
'''
sources.know({{{cell!r}: text}})
exec(compile(text, {cell!r}, "exec"), vars(main))
warnings.simplefilter("ignore")
torch.jit.script(main.Pair)
print(torch.jit.script(main.double)(3))
"""


def test_torch_jit_finds_the_source_of_a_cells_class_and_function(
    tmp_path, torch_forks
):
    script = tmp_path / "rank.py"
    script.write_text(JIT.format(cell=CELL))
    done = torch_forks.run(script, str(zipped_texts(tmp_path)))
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"12\n"
