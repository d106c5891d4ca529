"""Which names of the notebook follow a cell to ranks that stay."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from distmagic.errors import PayloadError, PayloadTooLarge
from distmagic.remote.values import call
from distmagic.request.cells.cell import CellPlan, parse_cell
from distmagic.staying import following

NOTEBOOK = """\
import math
lr = 0.5
big = bytes(2 << 20)
unused = 1
def helper(x):
    return x * lr
def train(x):
    return math.floor(helper(x))
class Model:
    def forward(self, x):
        return helper(x)
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The names of a notebook, whose functions are those of `__main__`."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(__import__("sys").modules, "__main__", main)
    exec(compile(NOTEBOOK, "/cells/1.py", "exec"), vars(main))
    return {name: one for name, one in vars(main).items() if not name.startswith("_")}


def plan(text: str) -> CellPlan:
    return parse_cell(text, whole=True, filename="/cells/2.py")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("train(1)", {"train", "math", "helper", "lr"}),
        ("Model()", {"Model", "helper", "lr"}),
        ("lr = 3\nprint(lr)", set()),
        ("lr = lr / 10", {"lr"}),
        ("lr += 1", {"lr"}),
        ("for lr in [lr]: pass", {"lr"}),
        ("if unused:\n    lr = 3\nprint(lr)", {"unused"}),
        ("from os import *\nlr", {"lr"}),
        ("def f():\n    return lr\nlr = 3\nf()", set()),
        ("def f():\n    global lr\n    lr = 3\nf()\nlr", set()),
        ("class C:\n    lr = 3\n    def f(self):\n        return lr", {"lr"}),
        ("def f(x):\n    return x.lr, [unused for unused in x]", set()),
        ("await helper(1)", {"helper", "lr"}),
        ("def f():\n    return unused", {"unused"}),
        ("other", set()),
    ],
)
def test_names_that_a_cell_uses_and_those_that_these_use(notebook, text, names):
    assert set(following.prepared(plan(text), notebook, (), {}, {}).digests) == names


def loaded(packed: following.CellParcel) -> tuple[call.Cell, dict[str, object]]:
    main = types.ModuleType("__main__")
    cell = call.load(packed.parcel.path, main)
    assert isinstance(cell, call.Cell)
    vars(main).update(cell.names)
    return cell, vars(main)


def test_a_function_goes_without_its_globals_which_follow_by_their_names(notebook):
    packed = following.prepared(
        plan("train(5)"), notebook, (), {}, {"/cells/1.py": "Cell In[1]"}
    )
    cell, main = loaded(packed)
    assert set(cell.names) == {"train", "math", "helper", "lr"}
    assert main["train"](5) == 2
    main["lr"] = 2.0
    assert main["train"](5) == 10
    assert packed.notice == (
        "From the notebook: train (Cell In[1]), math, helper (Cell In[1]), lr = 0.5."
    )


def test_only_what_has_changed_here_is_sent_again(notebook):
    first = following.prepared(plan("train(5)"), notebook, (), {}, {})
    again = following.prepared(plan("train(5)"), notebook, (), first.digests, {})
    assert again.notice == ""
    notebook["lr"] = 0.25
    changed = following.prepared(plan("train(5)"), notebook, (), first.digests, {})
    assert changed.notice == "From the notebook: lr = 0.25."


def test_names_that_cells_on_the_ranks_have_assigned_are_theirs(notebook):
    packed = following.prepared(plan("train(5)"), notebook, ("lr",), {}, {})
    cell, _ = loaded(packed)
    assert set(cell.names) == {"train", "math", "helper"}


def test_a_large_value_does_not_follow(notebook, golden):
    with golden.raises(PayloadTooLarge):
        following.prepared(plan("len(big)"), notebook, (), {}, {})


def test_what_cannot_travel_is_named(notebook, golden):
    notebook["file"] = open(__file__)  # noqa: SIM115
    with notebook["file"], golden.raises(PayloadError):
        following.prepared(plan("file.read()"), notebook, (), {}, {})


def test_what_functions_on_the_ranks_may_use_is_sent_again_when_it_has_changed(
    notebook,
):
    first = following.prepared(plan("train(5)"), notebook, (), {}, {})
    notebook["lr"] = 0.25
    text = plan("on_the_ranks()")
    changed = following.prepared(text, notebook, (), first.digests, {})
    assert changed.notice == "From the notebook: lr = 0.25."
    again = following.prepared(text, notebook, (), changed.digests, {})
    assert again.notice == ""
    theirs = following.prepared(text, notebook, ("lr",), first.digests, {})
    assert theirs.notice == ""


def test_what_has_grown_too_large_is_reported_once_unless_the_cell_uses_it(notebook):
    first = following.prepared(plan("lr"), notebook, (), {}, {})
    notebook["lr"] = bytes(2 << 20)
    grown = following.prepared(plan("1"), notebook, (), first.digests, {})
    assert "too large to be sent again, or not picklable: lr" in grown.notice
    assert following.prepared(plan("1"), notebook, (), grown.digests, {}).notice == ""
    with pytest.raises(PayloadTooLarge):
        following.prepared(plan("lr"), notebook, (), grown.digests, {})
    notebook["lr"] = 0.5
    small = following.prepared(plan("1"), notebook, (), grown.digests, {})
    assert small.notice == "From the notebook: lr = 0.5."


def test_a_deleted_name_is_sent_again_only_when_a_cell_uses_it(notebook):
    first = following.prepared(plan("lr"), notebook, (), {}, {})
    deleted = following.prepared(plan("del lr"), notebook, (), first.digests, {})
    digests = deleted.digests
    assert following.prepared(plan("1"), notebook, (), digests, {}).notice == ""
    used = following.prepared(plan("lr"), notebook, (), digests, {})
    assert used.notice == "From the notebook: lr = 0.5."


@pytest.mark.parametrize("text", ["try:\n    big\nexcept NameError:\n    big = 1", "big = big if unused else 1"])  # fmt: skip
def test_what_cannot_be_sent_does_no_harm_where_the_cell_assigns_it(notebook, text):
    packed = following.prepared(plan(text), notebook, (), {}, {})
    assert "big" not in packed.notice


def test_what_cannot_be_sent_does_no_harm_where_some_ranks_have_their_own(notebook):
    cell = plan("if unused == 0:\n    print(big)")
    with pytest.raises(PayloadTooLarge):
        following.prepared(cell, notebook, (), {}, {})
    following.prepared(cell, notebook, (), {}, {}, some_ranks=("big",))


def test_a_function_with_another_default_or_another_file_is_sent_again(notebook):
    def sent_after(there: dict[str, str]) -> tuple[dict[str, str], str]:
        packed = following.prepared(plan("f()"), notebook, (), there, {})
        return dict(packed.digests), packed.notice

    there: dict[str, str] = {}
    for text, is_sent in (
        ("def f(x=1): return x", True),
        ("def f(x=1): return x", False),
        ("def f(x=True): return x", True),
        ("def f(x=1.0): return x", True),
        ("def f(x: int = 1.0): return x", True),
    ):
        names = dict(vars(__import__("sys").modules["__main__"]))
        exec(compile(text, "/cells/3.py", "exec"), names)
        notebook["f"] = names["f"]
        there, notice = sent_after(there)
        assert ("From the notebook" in notice) is is_sent, text


def test_a_value_that_looks_the_same_and_is_not_is_sent_again(notebook):
    class Count(int):
        more = 1

    there: dict[str, str] = {}
    count = Count(3)
    for value, is_sent in ((0.0, True), (-0.0, True), (0, True), (False, True), (count, True), (count, False)):  # fmt: skip
        notebook["unused"] = value
        packed = following.prepared(plan("unused"), notebook, (), there, {})
        there = dict(packed.digests)
        assert ("From the notebook" in packed.notice) is is_sent, value


# Cells of a notebook, each before a cell on the ranks; what that cell shows in a process of its own.
TOGETHER = {
    "an object of a class that uses a name": [
        ("k = 1\nclass Box:\n    w = 0\n    def get(self): return self.w * k\nbox = Box()", "box.w = 5\nbox.get()", 5),
        ("k = 10", "box.get()", 50),
    ],
    "a function that holds a name's object among its own": [
        ("k = 1\nlog = []\ndef f(): log.append(k)\nfs = [f]", "fs[0]()\nlog", [1]),
        ("k = 2\nfs.append(f)", "fs[1]()\nlog", [1, 2]),
    ],
    "a name that is needed to load it": [
        (("import math\nclass Box:\n    w = 1\n    def __getstate__(self): return 2.5\n"
         "    def __setstate__(self, w): self.w = math.floor(w)\nbox = Box()"), "box.w", 2),
        ("import math\nother = Box()", "other.w", 2),
    ],
    "a decorator": [
        (("import functools, math\nk, log = 1, []\ndef noted(f):\n    @functools.wraps(f)\n    def inner(x):\n"
         "        log.append(math.floor(x))\n        return f(x)\n    return inner\n@noted\ndef f(x): return x * k"), "f(2), log", (2, [2])),
        ("k = 2", "f(3), log", (6, [2, 3])),
    ],
    "a decorator of a library": [
        ("import contextlib\nk = 1\n@contextlib.contextmanager\ndef f(x): yield x + k", "with f(1) as x: pass\nx", 2),
        ("k = 2", "with f(1) as x: pass\nx", 3),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ["rates", "rate"])
def test_what_goes_by_value_is_sent_again_when_it_has_changed(monkeypatch, name):
    import cloudpickle

    module: Any = types.ModuleType("rates")
    exec("LR = 1\ndef rate(): return LR", vars(module))
    monkeypatch.setitem(sys.modules, "rates", module)
    notebook = {"rates": module, "rate": module.rate}

    def digest() -> str:
        return following.prepared(plan(name), notebook, (), {}, {}).digests[name]

    by_name = digest()
    assert digest() == by_name
    cloudpickle.register_pickle_by_value(module)
    try:
        first = digest()
        module.LR = 2
        assert len({by_name, first, digest()}) == 3
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.parametrize("name", TOGETHER)
def test_what_names_share_in_the_notebook_they_share_on_the_ranks(name, monkeypatch):
    main, ranks = types.ModuleType("__main__"), types.ModuleType("__main__")
    digests: dict[str, str] = {}
    for text, cell, shown in TOGETHER[name]:
        monkeypatch.setitem(sys.modules, "__main__", main)
        exec(compile(text, "/cells/1.py", "exec"), vars(main))
        names = {one: value for one, value in vars(main).items() if one[0] != "_"}
        packed = following.prepared(plan(cell), names, (), digests, {})
        digests = dict(packed.digests)
        monkeypatch.setitem(sys.modules, "__main__", ranks)
        made = call.load(packed.parcel.path, ranks)
        assert isinstance(made, call.Cell)
        vars(ranks).update(made.names)
        value = call.perform(made, ranks)
        assert value == shown
