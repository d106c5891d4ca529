"""Names of the notebook that the call's code has as texts only: a rank finds them all the same."""

from __future__ import annotations

import pickle
import sys
import threading

import pytest

from distmagic.payload import pack
from distmagic.remote.values import by_name
from tests.builders.ranks import cell, on_a_rank

LIMIT = 256 << 20


def printed(source: str, tmp_path, **names) -> str:
    payload = pack.pack_call(cell(source, **names), limit_bytes=LIMIT, labels={})
    return on_a_rank(payload, tmp_path)


OPTIONS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal, Optional, get_type_hints
@dataclass
class Options:
    rate: Optional[float] = None
    mode: Literal["fast", "slow"] = "fast"
def fit():
    return sorted(get_type_hints(Options))
fit()"""

QUOTED = """
import typing
class Table(typing.TypedDict):
    rows: "List[int]"
from typing import List
def fit():
    return typing.get_type_hints(Table)["rows"]
fit()"""

FUNCTION = """
from __future__ import annotations
from pathlib import Path
import numpy as np
from fractions import Fraction as Part
from typing import get_type_hints
class Net:
    other: Net
    def forward(self, x: np.ndarray) -> Part: ...
def load(where: Path, n: int | None = None) -> list[Net]: ...
def fit():
    return [*get_type_hints(load), *get_type_hints(Net), *get_type_hints(Net.forward)]
fit()"""

PYDANTIC = """
from __future__ import annotations
import pydantic
class Inner(pydantic.BaseModel):
    n: int = 1
def fit():
    class Outer(pydantic.BaseModel):
        inner: Inner
    return Outer(inner={}).model_dump()
fit()"""

PARSER = """
from __future__ import annotations
from dataclasses import dataclass, field
from enum import Enum
from typing import List, Optional
class Mode(Enum):
    FAST = "fast"
@dataclass
class Options:
    rate: Optional[float] = None
    mode: Mode = Mode.FAST
    names: List[str] = field(default_factory=list)
def fit():
    from transformers import HfArgumentParser
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses(["--rate", "0.5"])
    return options.rate, options.mode
fit()"""

NAMES = """
import sys, json, functools
from collections import OrderedDict as Table
WIDTH = 3
SIZES = {"small": [1, 2]}
class Scheme: pass
class Linear(Scheme): pass
class Cosine(Scheme): pass
@functools.lru_cache
def cached(x): return x
def scaled(x): return WIDTH * x + len(SIZES)
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (OPTIONS, "['mode', 'rate']"),
        (QUOTED, "typing.List[int]"),
        (FUNCTION, "['where', 'n', 'return', 'other', 'x', 'return']"),
        (PYDANTIC, "{'inner': {'n': 1}}"),
        (PARSER, "(0.5, <Mode.FAST: 'fast'>)"),
    ],
)
def test_annotations_that_are_texts_are_found(source, expected, tmp_path):
    assert printed(source, tmp_path) == expected


BY_NAME = {
    "globals()['Linear'].__name__": "Linear",
    "globals()['Lin-ear'.replace('-', '')].__name__": "Linear",
    "eval('Lin-ear()'.replace('-', '')).__class__.__name__": "Linear",
    "getattr(sys.modules[__name__], 'Lin-ear'.replace('-', '')).__name__": "Linear",
    "[c.__name__ for c in Scheme.__subclasses__()]": ["Linear", "Cosine"],
    "eval('sca-led(2)'.replace('-', ''))": 7,
    "eval('js-on'.replace('-', '')).dumps(1)": "1",
    "eval('Ta-ble'.replace('-', ''))(a=1)['a']": 1,
    "globals()['cac-hed'.replace('-', '')](4)": 4,
    "vars(sys.modules['__main__'])['WID-TH'.replace('-', '')]": 3,
    "('miss' in globals(), hasattr(sys.modules['__main__'], 'miss'))": (False, False),
}


def test_what_cells_have_is_found_by_its_name(tmp_path):
    found = ", ".join(BY_NAME)
    there = printed(f"{NAMES}def fit(): return [{found}]\nfit()", tmp_path)
    assert there == str(list(BY_NAME.values()))


def test_a_name_in_the_call_itself_is_found(tmp_path):
    source = f"{NAMES}def build(name):\n    return eval(name + '()').__class__.__name__\nbuild('Cosine')"
    assert printed(source, tmp_path) == "Cosine"


def in_a_file(tmp_path, monkeypatch, thunk, *names: str) -> str:
    """Pickle what a notebook has under these names, as `torch.save` does too: by the names in its `__main__`."""
    main = sys.modules["__main__"]
    for name in names:
        monkeypatch.setattr(main, name, thunk.__globals__[name], raising=False)
    path = tmp_path / "vocabulary.pickle"
    path.write_bytes(pickle.dumps([thunk.__globals__[name] for name in names]))
    for name in names:
        monkeypatch.delattr(main, name)
    return str(path)


def test_a_pickle_in_a_file_finds_the_classes_and_functions_of_the_notebook(
    tmp_path, monkeypatch
):
    source = f"""{NAMES}
import pickle
def fit(path):
    linear, scaled = pickle.load(open(path, "rb"))
    return linear.__name__, linear is Scheme.__subclasses__()[0], scaled(1)
fit(path)"""
    thunk = cell(source, path="")
    path = in_a_file(tmp_path, monkeypatch, thunk, "Linear", "scaled")
    thunk.__globals__["path"] = path
    payload = pack.pack_call(thunk, limit_bytes=LIMIT, labels={})
    assert on_a_rank(payload, tmp_path) == "('Linear', True, 4)"


def test_a_module_that_only_an_unused_function_needs_stays_until_it_is_asked_for(
    tmp_path, monkeypatch
):
    (tmp_path / "foreign_plots.py").write_text("def draw(x): return x + 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = """
import sys, foreign_plots
def plot(x): return foreign_plots.draw(x)
def fit():
    name = "p-lot".replace("-", "")
    before = name in globals(), "foreign-_plots".replace("-", "") in sys.modules
    sys.path.append({path!r})
    return before, getattr(sys.modules["__main__"], name)(2), globals()[name](3)
fit()"""
    thunk = cell(source.format(path=str(tmp_path)))
    payload = pack.pack_call(thunk, limit_bytes=LIMIT, labels={})
    assert payload.modules == ()
    assert on_a_rank(payload, tmp_path) == "((False, False), 3, 4)"

    thunk = cell(source.format(path="/nowhere"))
    payload = pack.pack_call(thunk, limit_bytes=LIMIT, labels={})
    with pytest.raises(
        AssertionError, match=r"'plot': .*No module named 'foreign_plot"
    ):
        on_a_rank(payload, tmp_path)

    # An annotation brings it at once, with its module.
    source = source.replace("def fit():", 'def fit(with_: "plot" = None):')
    thunk = cell(source.format(path="/nowhere"))
    payload = pack.pack_call(thunk, limit_bytes=LIMIT, labels={})
    assert [module.name for module in payload.modules] == ["foreign_plots"]
    assert on_a_rank(payload, tmp_path) == "((True, True), 3, 4)"


def test_objects_and_secrets_stay_where_they_are(tmp_path):
    class Loud:
        def __reduce__(self):
            raise AssertionError("nobody asked for it")

    source = """
HF_TOKEN = "hf_abc"
SETTINGS = {"api_key": "sk-abc"}
n_tokens = 7
class Settings: token = "hf_abc"
def call(key="hf_abc"): return key
openaiKey = "hf_abc"
def login(): return HF_TOKEN, data, loud, 1
def fit():
    have = [name for name in ("HF_TOKEN", "SETTINGS", "data", "loud", "lock", "n_tokens", "login") if name in globals()]
    return have
fit()"""
    names = {
        "loud": Loud(),
        "lock": threading.Lock(),
        "data": bytearray(by_name.MAX_BYTES),
        "_i3": "text of a cell",
        "In": ["", "HF_TOKEN = 'hf_abc'"],
        "headers": {"Authorization": "Bearer hf_abc"},
        "dsn": "postgres://me:hf_abc@db/x",
        "url": "redis://:hf_abc@db",
    }
    thunk = cell(source, **names)
    payload = pack.pack_call(thunk, limit_bytes=LIMIT, labels={})
    assert payload.call.blob.size_bytes < by_name.MAX_BYTES
    data = payload.call.path.read_bytes()
    assert b"hf_abc" not in data
    assert b"sk-abc" not in data
    assert on_a_rank(payload, tmp_path) == "['n_tokens', 'login']"


def test_what_a_rank_has_is_not_replaced(tmp_path, monkeypatch):
    """A definition that is loaded late brings its globals: those that are there stay as they are."""
    (tmp_path / "foreign_plots.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = f"""
import sys, foreign_plots
count = 0
table = {{}}
def late(): return count, table, foreign_plots
def fit():
    global count
    count = 5
    table["x"] = 1
    sys.path.append({str(tmp_path)!r})
    return getattr(sys.modules["__main__"], "l-ate".replace("-", ""))()[:2]
fit()"""
    assert printed(source, tmp_path) == "(5, {'x': 1})"


def test_many_and_large_definitions_are_bounded(tmp_path):
    text = "x" * 40_000
    large = "\n".join(f"def f{n}(): return {text + str(n)!r}" for n in range(60))
    payload = pack.pack_call(
        cell(f"{large}\ndef fit(): return [n for n in range(60) if 'f%d' % n in globals()]\nfit()"),
        limit_bytes=LIMIT, labels={},
    )  # fmt: skip
    assert payload.call.blob.size_bytes < 1.2 * by_name.MAX_ALL_BYTES
    there = eval(on_a_rank(payload, tmp_path))
    assert there == list(range(60 - len(there), 60))  # the newest ones
    assert len(there) > 20


def test_equal_calls_give_equal_files():
    thunk = cell(f"{NAMES}def fit(): return 1\nfit()")
    first = pack.pack_call(thunk, limit_bytes=LIMIT, labels={})
    assert first == pack.pack_call(thunk, limit_bytes=LIMIT, labels={})
