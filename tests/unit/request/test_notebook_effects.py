"""Which statements of a cell act in the notebook alone, and which ordinary cells are left in peace."""

from __future__ import annotations

import importlib
import json
import json.decoder
import logging
import random
import sys
import textwrap
import warnings
from json import JSONDecoder, JSONEncoder
from random import seed
from warnings import simplefilter

import pytest

from distmagic.request.cells import library_changes as changes
from distmagic.request.cells.cell import parse_cell
from distmagic.request.cells.library_changes import library_changes
from distmagic.request.cells.notebook_effects import local_effects, note

TRAIN = "def train():\n    pass\ntrain()"


def changes_of(text, label, namespace, later=()):
    return library_changes(text, label, namespace, later, {})


def noted(body: str, given: tuple[str, ...] = (), *, whole: bool = False) -> str:
    plan = parse_cell(
        "#%%distributed\n" + textwrap.dedent(body).strip("\n") + "\n", whole=whole
    )
    return note(local_effects(plan.local, given))


EFFECTS = {
    "subscript": 'rank = int(os.environ["LOCAL_RANK"])',
    "get": 'rank = int(os.environ.get("LOCAL_RANK", 0))',
    "getenv": 'rank = os.getenv("LOCAL_RANK")',
    "from os import environ": 'rank = environ["LOCAL_RANK"]',
    "in": 'is_distributed = "LOCAL_RANK" in os.environ',
    "in a block": 'if os.environ["LOCAL_RANK"] == "0":\n    pass',
    "in a try": 'try:\n    rank = os.environ["LOCAL_RANK"]\nexcept KeyError:\n    rank = 0',
    "in an f-string": "device = f\"cuda:{os.environ['LOCAL_RANK']}\"",
    "in a class": 'class Config:\n    rank = os.environ["LOCAL_RANK"]',
    "as a default": 'def other(rank=os.environ["LOCAL_RANK"]):\n    pass',
    "world size": 'world = int(os.environ["WORLD_SIZE"])',
    "parse_args": "args = parser.parse_args()",
    "parse_known_args": "args, rest = argparse.ArgumentParser().parse_known_args()",
    "HfArgumentParser": "a, b = parser.parse_args_into_dataclasses()",
    "sys.argv": "epochs = int(sys.argv[1])",
    "sys.argv is set": 'sys.argv = ["train.py", "50"]',
    "torch.manual_seed": "torch.manual_seed(0)",
    "torch.cuda": "torch.cuda.manual_seed_all(0)",
    "random.seed": "random.seed(0)",
    "np.random.seed": "np.random.seed(0)",
    "set_seed": "set_seed(42)",
    "seed_everything": "pl.seed_everything(42)",
    "init_process_group": 'dist.init_process_group("gloo")',
    "variable": 'os.environ["OMP_NUM_THREADS"] = "4"',
    "setdefault": 'os.environ.setdefault("OMP_NUM_THREADS", "4")',
    "deleted": 'del os.environ["OMP_NUM_THREADS"]',
    "putenv": 'os.putenv("OMP_NUM_THREADS", "4")',
    "%env": "get_ipython().run_line_magic('env', 'OMP_NUM_THREADS=4')",
    "update": 'os.environ.update(A="1")',
    "clear": "os.environ.clear()",
    "unsetenv": 'os.unsetenv("OMP_NUM_THREADS")',
    "load_dotenv": "load_dotenv()",
    "sys.argv grows": 'sys.argv += ["--lr", "0.1"]',
    "sys.argv is appended to": 'if True:\n    sys.argv.append("--cpu")',
}


@pytest.mark.parametrize("name", EFFECTS)
def test_what_acts_in_the_notebook_alone_is_told(name, golden):
    golden(noted(f"{EFFECTS[name]}\n{TRAIN}"))


@pytest.mark.parametrize("name", EFFECTS)
def test_nothing_is_told_of_the_same_inside_the_function_or_of_a_whole_cell(name):
    statement = EFFECTS[name]
    assert noted(f"def train():\n{textwrap.indent(statement, '    ')}\ntrain()") == ""
    if "get_ipython" not in statement:  # that is refused in a whole cell
        assert noted(f"{statement}\n{TRAIN}", whole=True) == ""


ORDINARY = {
    "imports and a function": "import os, sys, random, torch\nimport torch.distributed as dist",
    "constants": "epochs, lr = 3, 1e-3\nnames = ['RANK', 'LOCAL_RANK']",
    "data": "data = torch.randn(100, generator=torch.Generator().manual_seed(0))",
    "seeded data": "torch.manual_seed(0)\ndata = torch.randn(100)",
    "a seeded model": "random.seed(1)\ntorch.manual_seed(1)\nmodel = Net().eval()",
    "a generator": "g = torch.Generator()\ng.manual_seed(0)",
    "a method that is called seed": "env.seed(3)\nenv.set_seed(3)",
    "a dataclass": "@dataclass\nclass Config:\n    lr: float = 1e-3\n    rank: int = 0",
    "arguments as a list": "args = parser.parse_args(['--lr', '0.1'])\nargs = parser.parse_args(args=[])",
    "its own command line": "sys.argv = ['train.py', '--lr', '0.1']\nargs = parser.parse_args()",
    "its own longer command line": "sys.argv.extend(['--lr', '0.1'])\nargs = parser.parse_args()",
    "other variables": "home = os.environ['HOME']\ntoken = os.environ.get('HF_TOKEN')\nuser = os.getenv('USER')",
    "hosts of the notebook": "os.environ['DISTMAGIC_HOSTS'] = 'gpu-a:4'",
    "a copy of the environment": "env = dict(os.environ)\nenv['A'] = '1'\nenv2 = os.environ.copy()",
    "a dict with such keys": "config = {'RANK': 0}\nrank = config['RANK']\nworld = config.get('WORLD_SIZE')",
    "a lambda": "rank_of = lambda: int(os.environ['RANK'])",
    "a method": "class A:\n    def rank(self):\n        return int(os.environ['RANK'])",
    "a nested function": "def setup():\n    torch.manual_seed(0)\n    dist.init_process_group('gloo')",
    "paths and files": "from pathlib import Path\nroot = Path.home() / 'data'\nroot.mkdir(exist_ok=True)",
    "prints": "print(torch.__version__)\nlen(sys.path)",
    "a magic": "get_ipython().run_line_magic('env', 'HOME')\nget_ipython().run_line_magic('matplotlib', 'inline')",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_nothing_is_told_of_ordinary_cells(name):
    assert noted(f"{ORDINARY[name]}\n{TRAIN}") == ""


def test_what_the_call_itself_does_runs_on_the_ranks():
    assert noted("def train(rank):\n    pass\ntrain(int(os.environ['RANK']))") == ""
    assert noted("def train():\n    torch.manual_seed(0)") == ""


def test_variables_that_the_ranks_get_anyway_are_not_told(golden):
    body = f'os.environ["OMP_NUM_THREADS"] = "4"\n{TRAIN}'
    assert noted(body, given=("OMP_NUM_THREADS",)) == ""
    golden(noted(body, given=("OTHER",)))


def test_a_pasted_program_is_told_of_once(golden):
    body = f"""
        import argparse, os, torch
        parser = argparse.ArgumentParser()
        args = parser.parse_args()
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.manual_seed(0)
        os.environ["A"] = "1"
        os.environ["B"] = "2"
        {TRAIN.replace(chr(10), chr(10) + " " * 8)}
    """
    golden(noted(body))


def test_an_effect_knows_the_lines_of_its_statement():
    plan = parse_cell(
        "#%%distributed\nrank = int(\n    os.environ[\n        'RANK'])\nlen([])\n",
        whole=False,
    )
    (effect,) = local_effects(plan.local)
    assert (effect.lineno, effect.lines) == (3, range(2, 5))


class Own:
    """A class of the notebook's."""


OF_A_NOTEBOOK = {
    "json": json, "JSONDecoder": JSONDecoder, "warnings": warnings, "logging": logging, "log": logging.getLogger("train"),
    "seed": seed, "simplefilter": simplefilter, "own": Own(), "count": 1, "setattr": setattr, "registry": random._inst, "encoder": JSONEncoder(),
}  # fmt: skip
Own.__module__ = "__main__"
OF_A_NOTEBOOK["Own"] = Own
OF_A_NOTEBOOK["ops"] = type("Library", (), {"__module__": "torch.library"})()
# What a cell says, the library that it changes, "" for none, and the words.
CHANGES = {
    "an attribute": ("json.BATCH = 512", "json", "sets json.BATCH"),
    "of a class of it": ("json.JSONDecoder.rate = 1", "json", "sets json.JSONDecoder.rate"),
    "of an imported class": ("JSONDecoder.rate = 1", "json", "sets JSONDecoder.rate"),
    "a function of a submodule": ("json.decoder.scan = lambda: 0", "json", "sets json.decoder.scan"),
    "an item": ("json.OPTIONS['batch'] = 3", "json", "sets json.OPTIONS['batch']"),
    "added": ("json.BATCH += 1", "json", "sets json.BATCH"),
    "deleted": ("del json.BATCH", "json", "sets json.BATCH"),
    "setattr": ("setattr(json, 'BATCH', 1)", "json", "an attribute of json"),
    "in a block": ("if True:\n    json.BATCH = 1", "json", "sets json.BATCH"),
    "a setter": ("json.set_default_dtype(1)", "json", "calls json.set_default_dtype"),
    "a registration": ("JSONDecoder.register_new_resolver('half', f)", "json", "calls JSONDecoder.register"),
    "an addition": ("json.decoder.add_safe_globals([Own])", "json", "add_safe_globals"),
    "a filter": ("warnings.filterwarnings('ignore')", "warnings", "calls warnings.filterwarnings"),
    "by its own name": ("simplefilter('ignore')", "warnings", "calls simplefilter"),
    "logging": ("logging.basicConfig(level=10)", "logging", "calls logging.basicConfig"),
    "a logger": ("log.setLevel(10)", "logging", "calls log.setLevel"),
    "a logger that is made there": ("logging.getLogger('x').addHandler(h)", "logging", "addHandler"),
    "an object that a library keeps": ("registry.register('x', f)", "random", "calls registry.register"),
    "an operator": ("ops.define('inc(Tensor x) -> Tensor')", "torch", "calls ops.define"),
    "an operator's kernel": ("ops.impl('inc', f, 'CPU')", "torch", "calls ops.impl"),
    "a value of a library's class": ("encoder.register_buffer('x')", "", ""),
    "a value": ("own.rate = 1", "", ""),
    "a value's method": ("own.set_rate(1)", "", ""),
    "a class of the notebook": ("Own.rate = 1", "", ""),
    "what is read": ("x = json.BATCH", "", ""),
    "a result that is kept": ("model = json.add_adapter(model)", "", ""),
    "a setter whose result is kept": ("_ = json.set_grad_enabled(False)", "json", "calls json.set_grad_enabled"),
    "an object in it": ("warnings.filters.clear()", "warnings", "calls warnings.filters.clear"),
    "a function called as a method of objects": ("json.append(x, 1)", "", ""),
    "a new object of it": ("net = json.JSONDecoder().append(1)\njson.JSONDecoder().append(1)", "", ""),
    "a value's method of objects": ("own.update(1)\nown.rates.append(1)\nown += 1", "", ""),
    "a number": ("count += 1", "", ""),
    "another function": ("json.dumps(3)", "", ""),
    "in a function": ("def f():\n    json.BATCH = 1", "", ""),
    "no Python": ("json.BATCH = = 1", "", ""),
}  # fmt: skip


def test_of_another_cell_a_variable_is_told_too():
    text = "os.environ['WORD'] = 'a'\ndef f():\n    os.environ['NO'] = 'b'"
    (found,) = changes_of(text, "Cell In[1]", {})
    assert (found.kind, found.name, found.lineno) == ("variable", "WORD", 1)
    assert list(changes_of(text, "", {})) == []
    assert list(changes_of(f"#%%distributed\n{text}", "Cell In[1]", {})) == []


def test_a_text_is_looked_through_once(monkeypatch):
    """Each launch asks for all cells of the session, which may be hundreds."""
    text = "import json\njson.EXTRA = 'looked through once'\ntorch.manual_seed(7)"
    first = list(changes_of(text, "Cell In[1]", {"json": json}, ["once = 1"]))
    assert len(first) == 2
    monkeypatch.setattr(changes, "executed", None)
    again = changes_of(text, "Cell In[1]", {"json": json}, ["once = 1"])
    assert list(again) == first


SEEDS = "import torch\ntorch.manual_seed(7)\ndef f():\n    return torch.rand(2)"


@pytest.mark.parametrize(
    ("text", "later", "is_told"),
    [
        (SEEDS, (), True),
        (SEEDS, ("def g():\n    return draw()", "get_ipython().run_line_magic('a', '')"), True),
        (SEEDS, ("#%%distributed\nx = 3\nf()",), True),
        (SEEDS, ("x = torch.rand(2)",), False),
        (SEEDS, ("#%%distributed\nx = torch.rand(2)\nf(x)",), False),
        (f"{SEEDS}\nx = f()", (), False),
        ("from transformers import set_seed\nset_seed(7)", (), True),
        ("def g():\n    torch.manual_seed(7)", (), False),
    ],
)  # fmt: skip
def test_of_another_cell_a_seed_is_told_where_nothing_is_drawn_here(
    text, later, is_told
):
    found = list(changes_of(text, "Cell In[1]", {}, later))
    assert [one.kind for one in found] == ["seed"] * is_told
    assert list(changes_of(text, "", {}, later)) == []
    if is_told:
        assert note(found).startswith(
            "Cell In[1], line 2 seeds the notebook, not the ranks."
        )


def test_a_long_sum_is_no_fault_of_a_cell():
    long = " + ".join(["a"] * 450)
    assert list(changes_of(f"x = {long}\n{long}", "Cell In[1]", {})) == []
    later = (f"x = {long}", "get_ipython().run_line_magic('timeit', 'f()')")
    found = list(
        changes_of("import torch\ntorch.manual_seed(3)", "Cell In[1]", {}, later)
    )
    assert [one.kind for one in found] == ["seed"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_cell_that_changes_a_library_changes_that_of_the_notebook_alone(name, golden):
    text, library, words = CHANGES[name]
    found = list(changes_of(f"\n{text}", "Cell In[2]", OF_A_NOTEBOOK))
    assert [effect.name for effect in found] == ([library] if library else [])
    if library:
        lineno = text.count("\n") + 2
        assert words in found[0].words
        assert note(found).startswith(f"Cell In[2], line {lineno} ")
        golden(note(found))


CONFIG = """import types
CFG: dict = {"lr": 0.1}
LAYERS = [1]
space = types.SimpleNamespace(model=types.SimpleNamespace(depth=1))
COUNT = 3
"""
OF_CONFIG = {
    "an item": ("CFG['lr'] = 3", "CFG"),
    "a deleted item": ("del CFG['lr']", "CFG"),
    "update": ("CFG.update(lr=3)", "CFG"),
    "|=": ("CFG |= {'lr': 3}", "CFG"),
    "a popped item": ("lr = CFG.pop('lr')", "CFG"),
    "append": ("LAYERS.append(2)", "LAYERS"),
    "+=": ("LAYERS += [2]", "LAYERS"),
    "an attribute": ("space.model.depth = 3", "space"),
    "a method of an attribute": ("space.merge_from_file('a.yaml')", "space"),
    "another list": ("LAYERS = LAYERS + [2]", ""),
    "what is read": ("lr = CFG.get('lr')", ""),
    "a number": ("COUNT += 1", ""),
}


@pytest.mark.parametrize("name", OF_CONFIG)
def test_a_change_of_an_object_that_a_module_of_the_user_keeps_is_told(
    name, tmp_path, monkeypatch
):
    """Ranks get a copy of it; their own modules have what their files say."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "effects_config.py").write_text(CONFIG)
    user = "from effects_config import *\ndef rate(): return CFG\n"
    (tmp_path / "effects_user.py").write_text(user)
    for module in ("effects_user", "effects_config"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    names = vars(importlib.import_module("effects_user")).copy()
    text, kept = OF_CONFIG[name]
    found = list(changes_of(text, "", names))
    assert [one.name for one in found] == (["effects_config"] if kept else [])
    if kept:
        words = note(found)
        assert f"leaves the ranks' effects_config.{kept} as it is. " in words
        assert f"inside the function, do it to effects_config.{kept}, too." in words
