"""What the text of a program shows before its ranks run it."""

from __future__ import annotations

import json
import linecache
import os
import warnings
import zipfile

import pytest

from distmagic.payload import on_ranks, pack
from distmagic.payload.program import pack_program
from distmagic.payload.work_files import with_tree
from distmagic.request.flags import Program

SETS = {
    "subscript": 'os.environ["HF_HOME"] = "/x"',
    "deleted": 'del os.environ["HF_HOME"]',
    "a name that is computed": 'os.environ[f"HF_{name}"] = "/x"',
    "setdefault": 'os.environ.setdefault("HF_HUB_OFFLINE", "1")',
    "update": 'os.environ.update(HF_HOME="/x")',
    "|=": 'os.environ |= {"HF_HOME": "/x"}',
    "pop": 'os.environ.pop("HF_HOME", None)',
    "putenv": 'os.putenv("HF_HOME", "/x")',
    "unsetenv": 'os.unsetenv("HF_HOME")',
    "from os import environ": 'environ["HF_HOME"] = "/x"',
    "another name for it": "env = os.environ",
    "another name with a type": "env: dict = os.environ",
    "another name in an expression": '(env := os.environ)["HF_HOME"] = "/x"',
    "another name in a loop": 'for env in [os.environ]: env["HF_HOME"] = "/x"',
    "import os as": 'import os as o\no.environ["HF_HOME"] = "/x"',
    "import environ as": 'from os import environ as E\nE["HF_HOME"] = "/x"',
    "import putenv as": 'from os import putenv as put\nput("HF_HOME", "/x")',
    "patch.dict": 'with patch.dict(os.environ, {"HF_HOME": "/x"}): pass',
    "dict.update": 'dict.update(os.environ, HF_HOME="/x")',
    "an argument": "setup(os.environ)",
    "a named argument": "setup(env=os.environ)",
    "__setitem__": 'os.environ.__setitem__("HF_HOME", "/x")',
    "a file of variables": "load_dotenv()",
    "in a function": 'def f():\n    os.environ["HF_HOME"] = "/x"',
    "%env": "get_ipython().run_line_magic('env', 'HF_HOME=/x')",
}
SETS_NOT = {
    "read": 'x = os.environ["HF_HOME"]',
    "get": 'x = os.environ.get("HF_HOME")',
    "in": 'x = "HF_HOME" in os.environ',
    "a copy": "env = dict(os.environ, HF_HOME='/x')",
    "a copy in a dict": "env = {**os.environ, 'HF_HOME': '/x'}",
    "copy": "env = os.environ.copy()",
    "copies as arguments": "run(env=dict(os.environ), **os.environ)",
    "its names": "x = [name for name in os.environ]\nfor name in os.environ: pass",
    "its items": "x = sorted(os.environ.items()), len(os.environ)",
    "under another name": 'import os as o\nx = o.environ["HF_HOME"]',
    "torchrun's own by a method": 'os.environ.setdefault("MASTER_ADDR", "localhost")',
    "for torchrun's own": 'os.environ["MASTER_ADDR"] = "localhost"',
    "in words": '"""os.environ is not set here"""',
    "no Python": "os.environ[ = 1",
}


@pytest.mark.parametrize("name", [*SETS, *SETS_NOT])
def test_a_program_that_sets_variables_gets_new_processes(name):
    text = f"{ {**SETS, **SETS_NOT}[name] }\nf()\nimport transformers"
    loaded = on_ranks.look([("train.py", text, None)]).may_be_loaded
    assert loaded == (frozenset() if name in SETS else None)


SETS_ONE = 'os.environ["HF_HOME"] = "/x"'
IN_FUNCTION = f"def f():\n    {SETS_ONE}\n"
LATE: dict[str, list[str]] = {
    "the next line": [f"{SETS_ONE}\nimport lib"],
    "the same line": [f"import lib; {SETS_ONE}"],
    "in the function": [f"{IN_FUNCTION}    import lib"],
    "in another function": [f"def g(): import lib\n{IN_FUNCTION}"],
    "after a call": ["from own import f\nf()\nimport lib", IN_FUNCTION],
    "by a name that is computed": [f"{IN_FUNCTION}    importlib.import_module(name)"],
    "by a computed name elsewhere": [IN_FUNCTION, "def g(): return __import__(name)"],
    "of its own package": [f"{IN_FUNCTION}    from . import own", "import lib"],
    "another part of it": [f"import lib\n{IN_FUNCTION}    from lib import part"],
    "in another text": [SETS_ONE, "import lib"],
    "a text that is imported later": [f"{IN_FUNCTION}    import own", "import lib"],
    "between two variables": [f"{SETS_ONE}\nimport lib\n{SETS_ONE}"],
}
EARLY: dict[str, list[str]] = {
    "a line before": [f"import lib\n{SETS_ONE}"],
    "before the function": [f"import lib\n{IN_FUNCTION}"],
    "twice": [f"import lib\n{IN_FUNCTION}    import lib"],
    "Python's own later": [f"import lib\n{IN_FUNCTION}    import json"],
    "after a call of Python's own": [
        f"sys.path.insert(0, '.')\nimport lib\n{IN_FUNCTION}"
    ],
    "after a call, before the function": [f"g()\nimport lib\n{IN_FUNCTION}"],
    "after the function": [f"{IN_FUNCTION}\nimport lib\nf()"],
    "in another text": ["import lib\nlib.f()", IN_FUNCTION],
}


@pytest.mark.parametrize(("name", "value"), [("E", os.environ), ("o.environ", os)])
def test_a_cell_sets_a_variable_by_a_name_that_another_has_imported(name, value):
    text = f'{name}["HF_HOME"] = "/x"\nimport lib'
    names = on_ranks.other_names({"os": os, name.partition(".")[0]: value})
    for given, loaded in ((names, frozenset()), ({}, None)):
        found = on_ranks.look([("Cell In[2]", text, None)], names=given)
        assert found.may_be_loaded == loaded


@pytest.mark.parametrize("name", LATE)
def test_nothing_is_loaded_before_a_variable_that_an_import_could_read(name):
    texts = [("train.py", text, None) for text in LATE[name]]
    assert on_ranks.look(texts).may_be_loaded == frozenset()


@pytest.mark.parametrize("name", EARLY)
def test_what_is_imported_before_the_first_variable_may_be_loaded(name):
    texts = [("train.py", text, None) for text in EARLY[name]]
    loaded = on_ranks.look(texts).may_be_loaded
    assert loaded is not None
    assert "lib" in loaded


STARTS = {
    "mp.spawn": "mp.spawn(main, args=(2,), nprocs=2)",
    "positional": "mp.spawn(main, (2,), 2)",
    "in full": "torch.multiprocessing.spawn(main, nprocs=2)",
    "by name": "spawn(main, args=(2,), nprocs=2)",
    "start_processes": 'mp.start_processes(main, nprocs=2, start_method="fork")',
    "in a function": "def run():\n    mp.spawn(main, nprocs=torch.cuda.device_count())",
}
STARTS_BY_A_LIBRARY = {
    'strategy="ddp"': 'trainer = L.Trainer(devices=2, strategy="ddp_notebook")',
    "main(...)": "accelerate.notebook_launcher(main, (1,), num_processes=2)",
}
STARTS_NOT = {
    "a strategy": 'L.Trainer(strategy="ddp")',
    "numpy's": "children = rng.spawn(2)",
    "pexpect's": 'child = pexpect.spawn("ls")',
    "a pool": 'mp.get_context("spawn").Pool(2)',
}


@pytest.mark.parametrize("name", [*STARTS, *STARTS_NOT])
def test_a_program_that_starts_ranks_itself_is_named_with_the_call_to_write(name):
    text = {**STARTS, **STARTS_NOT}[name]
    notice = on_ranks.look([("train.py", f"\n{text}", None)]).notice
    assert bool(notice) is (name in STARTS)
    if notice:
        assert f"train.py, line {text.count(chr(10)) + 2} " in notice
        assert 'main(int(os.environ["RANK"]), ...)' in notice


@pytest.mark.parametrize("cure", STARTS_BY_A_LIBRARY)
def test_a_library_that_starts_ranks_itself_is_named_with_what_to_write(cure):
    text = STARTS_BY_A_LIBRARY[cure]
    notice = on_ranks.look([("Cell In[1]", text, None)]).notice
    assert notice.startswith("Cell In[1], line 1 starts ranks of its own")
    assert notice.endswith(f"Write in its place {cure}.")


def may_be_loaded(payload):
    return sources(payload)["may_be_loaded"]


def sources(payload):
    with zipfile.ZipFile(payload.code.path) as archive:
        return json.loads(archive.read("sources.json"))


CELL = """import os
os.environ["SET_HERE"] = "1"  # in the notebook
def sets(): os.environ["SET"] = "1"; import lib
def sets_only(): os.environ["SET"] = warnings.__name__
def outer():
    def inner():
        os.environ["SET"] = "1"
        import lib
    return inner()
def plain(): return os.environ.get("SET")
def spawns(): mp.spawn(plain, nprocs=2)
"""


@pytest.mark.parametrize(
    ("name", "loaded"),
    [
        ("sets", []),
        ("outer", []),
        ("sets_only", ["os", "warnings"]),
        ("plain", None),
        ("spawns", None),
    ],
)
def test_of_a_cell_only_those_functions_count_that_travel(name, loaded, tmp_path):
    lines = CELL.splitlines(keepends=True)
    linecache.cache["<a cell>"] = (len(CELL), None, lines, "<a cell>")
    names = {"__name__": "__main__", "mp": None, "warnings": warnings}
    exec(compile(CELL, "<a cell>", "exec"), names)
    payload = pack.pack_call(
        names[name], limit_bytes=1 << 20, labels={"<a cell>": "Cell In[7]"}
    )
    found = may_be_loaded(payload)
    assert found == loaded or set(found) > set(loaded) > set()
    assert ("Cell In[7], line 11 starts ranks" in payload.notice) is (name == "spawns")


def test_a_payload_has_the_names_of_the_libraries_that_its_call_uses(tmp_path):
    names = {"__name__": "__main__", "linecache": linecache, "pytest": pytest}
    text = "def f():\n    import zipfile\n    return linecache.cache, g()\ndef g(): json\ndef other(): pytest"
    exec(compile(text, "<a cell>", "exec"), names)
    payload = pack.pack_call(names["f"], limit_bytes=1 << 20, labels={})
    assert {"linecache", "zipfile", "logging", "warnings"} <= payload.uses
    assert "pytest" not in payload.uses
    assert {"linecache", "zipfile"} <= set(sources(payload)["imports"])


def test_a_payload_names_what_its_call_and_its_modules_import(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_module.py").write_text("from a import b\nimport c.d as e\n")
    text = (
        "def f():\n    import own_module\n    from g.h import i, j\n    from . import k"
    )
    names = {"__name__": "__main__"}
    exec(compile(text, "<a cell>", "exec"), names)
    payload = pack.pack_call(names["f"], limit_bytes=1 << 20, labels={})
    imports = {"own_module", "g.h", "g.h.i", "g.h.j", "a", "a.b", "c.d"}
    assert imports <= set(sources(payload)["imports"])
    assert "" not in sources(payload)["imports"]


@pytest.mark.parametrize(
    ("target", "is_module"), [("train.py", False), ("lab.train", True)]
)
def test_of_a_program_all_counts_that_it_imports_from_its_folder(
    target, is_module, tmp_path
):
    def packed():
        return pack_program(
            Program(target=target, is_module=is_module),
            sync=None,
            current=tmp_path,
            limit_bytes=1 << 20,
        )

    (tmp_path / "lab").mkdir()
    for name in ("train.py", "lab/train.py"):
        (tmp_path / name).write_text("import first")
    (tmp_path / "first.py").write_text("from lab.deep import x")
    (tmp_path / "other.py").write_text(SETS["subscript"])
    (tmp_path / "lab" / "deep.py").write_text("import first")
    assert may_be_loaded(packed()) is None
    assert sources(packed())["imports"] == ["first", "lab.deep", "lab.deep.x"]
    (tmp_path / "lab" / "deep.py").write_text(f"import first\n{SETS['update']}")
    assert may_be_loaded(packed()) == []


def test_what_is_noticed_of_a_program_stands_beside_what_is_noticed_of_its_files(
    tmp_path,
):
    (tmp_path / "train.py").write_text(STARTS["mp.spawn"])
    payload = pack_program(
        Program(target="train.py"), sync=None, current=tmp_path, limit_bytes=1 << 20
    )
    assert "mp.spawn" in with_tree(payload, None, tmp_path).notice
