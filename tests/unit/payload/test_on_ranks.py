"""What the text of a program shows before its ranks run it."""

from __future__ import annotations

import json
import linecache
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
    "a file of variables": "load_dotenv()",
    "in a function": 'def f():\n    os.environ["HF_HOME"] = "/x"',
    "%env": "get_ipython().run_line_magic('env', 'HF_HOME=/x')",
}
SETS_NOT = {
    "read": 'x = os.environ["HF_HOME"]',
    "get": 'x = os.environ.get("HF_HOME")',
    "in": 'x = "HF_HOME" in os.environ',
    "a copy": "env = dict(os.environ, HF_HOME='/x')",
    "for torchrun's own": 'os.environ["MASTER_ADDR"] = "localhost"',
    "in words": '"""os.environ is not set here"""',
    "no Python": "os.environ[ = 1",
}


@pytest.mark.parametrize("name", [*SETS, *SETS_NOT])
def test_a_program_that_sets_variables_gets_new_processes(name):
    text = {**SETS, **SETS_NOT}[name]
    assert on_ranks.look([("train.py", text, None)]).needs_new is (name in SETS)


STARTS = {
    "mp.spawn": "mp.spawn(main, args=(2,), nprocs=2)",
    "positional": "mp.spawn(main, (2,), 2)",
    "in full": "torch.multiprocessing.spawn(main, nprocs=2)",
    "by name": "spawn(main, args=(2,), nprocs=2)",
    "start_processes": 'mp.start_processes(main, nprocs=2, start_method="fork")',
    "in a function": "def run():\n    mp.spawn(main, nprocs=torch.cuda.device_count())",
}
STARTS_NOT = {
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


def needs_new(payload):
    return sources(payload)["needs_new"]


def sources(payload):
    with zipfile.ZipFile(payload.code.path) as archive:
        return json.loads(archive.read("sources.json"))


CELL = """import os
os.environ["SET_HERE"] = "1"  # in the notebook
def sets(): os.environ["SET"] = "1"
def outer():
    def inner():
        os.environ["SET"] = "1"
    return inner()
def plain(): return os.environ.get("SET")
def spawns(): mp.spawn(plain, nprocs=2)
"""


@pytest.mark.parametrize(
    ("name", "is_new"),
    [("sets", True), ("outer", True), ("plain", False), ("spawns", False)],
)
def test_of_a_cell_only_those_functions_count_that_travel(name, is_new, tmp_path):
    lines = CELL.splitlines(keepends=True)
    linecache.cache["<a cell>"] = (len(CELL), None, lines, "<a cell>")
    names = {"__name__": "__main__", "mp": None}
    exec(compile(CELL, "<a cell>", "exec"), names)
    payload = pack.pack_call(
        names[name],
        limit_bytes=1 << 20,
        labels={"<a cell>": "Cell In[7]"},
    )
    assert needs_new(payload) is is_new
    assert ("Cell In[7], line 9 starts ranks" in payload.notice) is (name == "spawns")


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
    assert not needs_new(packed())
    assert sources(packed())["imports"] == ["first", "lab.deep", "lab.deep.x"]
    (tmp_path / "lab" / "deep.py").write_text(f"import first\n{SETS['update']}")
    assert needs_new(packed())


def test_what_is_noticed_of_a_program_stands_beside_what_is_noticed_of_its_files(
    tmp_path,
):
    (tmp_path / "train.py").write_text(STARTS["mp.spawn"])
    payload = pack_program(
        Program(target="train.py"), sync=None, current=tmp_path, limit_bytes=1 << 20
    )
    assert "mp.spawn" in with_tree(payload, None, tmp_path).notice
