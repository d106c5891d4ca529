"""A call for hosts whose Python is of another minor version: no byte code in it, and it runs there; what can't is named."""

from __future__ import annotations

import ast
import linecache
import os
import pickletools
import sys
import types
from pathlib import Path

import pytest

from distmagic.errors import PayloadError
from distmagic.payload import bundle, pack
from distmagic.remote.values import parcel
from distmagic.request.cells import cell as cells
from tests.builders.pythons import OTHER_MINORS, another_python
from tests.builders.shell import completed

CELL = "/tmp/ipykernel_1/cell.py"
OURS = "python" + ".".join(map(str, sys.version_info[:2]))
SHAPES = """
import abc, asyncio, collections, dataclasses, enum, functools, pathlib, typing
from dataclasses import dataclass, field
scale = 3
def decorated(function):
    @functools.wraps(function)
    def inner(*args, **given):
        return function(*args, **given) + 1
    return inner
@decorated
def plus(a, *, b=2):
    return a + b
def adder(n):
    total = 0
    def add(x):
        nonlocal total
        total += x * n
        return total
    return add
add = adder(scale)
low, high = lambda x: x - 1, lambda x: x + 1
pick = {"up": lambda x: x + 1,
        "all": lambda x: [(lambda y: y * scale)(each) for each in x]}
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
async def waits(x):
    await asyncio.sleep(0)
    return x
def match(x):
    match x:
        case [a, _]:
            return a
@dataclass
class Config:
    name: str
    lr: float = 0.1
    tags: list = field(default_factory=list)
    twice: float = field(init=False, repr=False)
    kinds: typing.ClassVar[dict] = {"a": 1}
    def __post_init__(self):
        self.twice = 2 * self.lr
    @classmethod
    def named(cls, name):
        return cls(name)
@dataclass
class Deep(Config):
    depth: int = 4
    _: dataclasses.KW_ONLY
    only: int = 5
@dataclass(frozen=True, order=True, slots=True)
class Point:
    x: int
    y: int = 7
    def __repr__(self):
        return f"<{self.x},{self.y}>"
@dataclass(slots=True)
class Pixel:
    x: int
    tags: list = field(default_factory=list)
    y: int = 7
class Slotted:
    __slots__ = ("__x", "y")
    def __init__(self, x):
        self.__x = self.y = x
    def __eq__(self, other):
        return (self.__x, self.y) == (other.__x, other.y)
class Planet(enum.Enum):
    EARTH = 5, 6
    def __init__(self, mass, radius):
        self.mass = mass
class Row(typing.NamedTuple):
    a: int
    b: "str" = "z"
    def both(self):
        return f"{self.a}{self.b}"
Pair = collections.namedtuple("Pair", "left right", defaults=[9])
class Color(enum.Enum):
    RED = 1
    BLUE = "b"
    def low(self):
        return self.name.lower()
    @classmethod
    def _missing_(cls, value):
        return cls.RED
class Allowed(enum.IntFlag):
    READ = 1
    WRITE = 2
    BOTH = 3
class Shape(abc.ABC):
    registry = {}
    def __init_subclass__(cls):
        Shape.registry[cls.__name__] = cls
    @abc.abstractmethod
    def area(self): ...
class Square(Shape):
    def __init__(self, side):
        super().__init__()
        self.side = side
    def area(self):
        return self.side ** 2
    @functools.cached_property
    def half(self):
        return self.side / 2
T = typing.TypeVar("T")
class Box(typing.Generic[T]):
    def __init__(self, x: T):
        self.x = x
    def get(self) -> T:
        return self.x
@typing.runtime_checkable
class HasGet(typing.Protocol):
    def get(self): ...
@functools.singledispatch
def shown(x):
    return "any"
@shown.register
def _(x: int):
    return "int"
@functools.lru_cache
def cached(n):
    return n * scale
def meter():
    total = 0
    def count(x):
        nonlocal total
        total += x
    return count, lambda: total
count, total = meter()
class Grand:
    flag = True
class Parent(Grand):
    pass
class Mixin:
    flag = False
    def step(self):
        return "mixin"
@dataclass
class Own(Parent, Mixin):
    flag: bool = False
    step = Mixin.step
class Word(str, enum.Enum):
    TRAIN = "train"
    __str__ = str.__str__
here = pathlib.Path("/data")
config = Config("c", tags=[1])
def train(k):
    return [
        plus(k), add(2), low(1), high(1), pick["up"](1), pick["all"]([1]), fibonacci(9), asyncio.run(waits(5)), match([1, 2]),
        config, Config.named("d").twice, Config.kinds, Deep("e", only=6), Point(1), Point(2) < Point(3), {Point(1)},
        Row(3).both(), Row(1)._replace(b="q"), Pair(1), Pair(1)._asdict(),
        Color.RED, Color("b").low(), Color(55), Allowed.READ | Allowed.WRITE, list(Color),
        Square(3).area(), Square(4).half, sorted(Shape.registry), Box[int](4).get(), isinstance(Box(1), HasGet),
        Pixel(1), Pixel(2, [1], 3), hasattr(Pixel(1), "__dict__"), Slotted(3), Planet.EARTH, Planet.EARTH.mass,
        Allowed["BOTH"],
        isinstance(3, HasGet), shown(3), shown("x"), cached(2), here / "y",
        count(4), count(2), total(), Own(), Own.flag, Own().step(), str(Word.TRAIN), Word("train"),
    ]
train(5)"""
RANK = """
import sys, traceback, types
bundle, payload_call, payload_code, folder = sys.argv[1:]
sys.path[:0] = [bundle]
from pathlib import Path
from distmagic.remote.rank import sources
from distmagic.remote.values import call, left_out
sources.load(Path(payload_code))
sys.modules["__main__"] = main = types.ModuleType("__main__")
main.__file__ = call.write_main(Path(folder, call.MAIN_FILE), payload_call)
try:
    value = call.perform(call.load(payload_call, main), main)
except ZeroDivisionError:
    sys.exit(traceback.format_exc())
print(left_out.dump(value, f"{folder}/result", sources.form_of_results(Path(payload_code)))[1])
"""


@pytest.fixture(autouse=True)
def main(tmp_path, monkeypatch):
    """A folder of blobs, and a `__main__` of this test's own, as a notebook's."""
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    fresh = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", fresh)
    return fresh


def call_of(text: str):
    """Run a cell's own statements, and return its call and the call's text."""
    lines = text.splitlines(keepends=True)
    linecache.cache[CELL] = (len(text), None, lines, CELL)
    plan = cells.parse_cell(text, whole=False, filename=CELL)
    names = vars(sys.modules["__main__"])
    module = ast.Module(list(plan.local), [])
    exec(compile(module, CELL, "exec", dont_inherit=True), names)
    assert plan.call is not None
    return cells.make_thunk(plan, names, CELL), ast.unparse(plan.call)


def packed(text: str, minor: int = sys.version_info[1]) -> pack.Payload:
    thunk, title = call_of(text)
    payload = pack.pack_call(
        thunk, limit_bytes=1 << 20, labels={CELL: "Cell In[3]"}, title=title
    )
    assert payload.in_source is not None
    in_source = payload.in_source(pack.OtherPython(host="gpu-a", version=(3, minor)))
    assert in_source.in_source is None
    return in_source


def rank(payload: pack.Payload, python: str, folder: Path) -> tuple[str, str]:
    """Run a payload as a rank with this Python does, and return what it wrote to stdout and stderr."""
    files = [bundle.build().path, payload.call.path, payload.code.path, folder]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = completed([python, "-c", RANK, *map(str, files)], check=False, env=environment)  # fmt: skip
    return done.stdout.strip(), done.stderr


def on_a_rank(payload: pack.Payload, python: str, folder: Path) -> object:
    """Run a payload as a rank with this Python does, and return the result as the notebook reads it."""
    assert rank(payload, python, folder) == ("", "")
    return parcel.load(folder / "result")


@pytest.mark.parametrize("minor", [sys.version_info[1], *OTHER_MINORS])
def test_all_shapes_of_functions_and_classes_run_on_another_python(minor, tmp_path):
    is_own = minor == sys.version_info[1]
    python = sys.executable if is_own else another_python((minor,))
    payload = packed(SHAPES, minor)
    expected = sys.modules["__main__"].train(5)
    returned = on_a_rank(payload, python, tmp_path)
    assert returned == expected
    # Each object that came back is of the notebook's own class.
    assert [type(one) for one in returned] == [type(one) for one in expected]


@pytest.mark.parametrize(
    "call",
    [
        "train(1,\n  lambda x: x + scale)",
        "await wait(train(1, abs)) + 3",
        "[train(i, abs) for i in range(1, 5)][3]",
    ],
)
def test_the_call_is_what_the_cell_says(call, tmp_path):
    text = f"scale = 3\nasync def wait(x):\n    return x\ndef train(a, f):\n    return f(a)\n{call}"
    assert on_a_rank(packed(text), sys.executable, tmp_path) == 4


def test_a_traceback_there_names_the_cell_s_lines(tmp_path):
    payload = packed("def train():\n    x = 1\n    return x / 0\n\ntrain()")
    _, stderr = rank(payload, another_python(), tmp_path)
    assert f'File "{CELL}", line 5, in <module>' in stderr
    assert f'File "{CELL}", line 3, in train\n    return x / 0' in stderr


def test_modules_that_an_inner_function_imports_come_along(tmp_path, monkeypatch):
    (tmp_path / "besides.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    payload = packed(
        "def train():\n    def inner():\n        import besides\n        return besides.value\n    return inner()\ntrain()"
    )
    assert [module.name for module in payload.modules] == ["besides"]


def test_there_is_no_byte_code_in_it():
    payload = packed(SHAPES)
    data = payload.call.path.read_bytes()[len(parcel.MAGIC) :]
    words = {str(word) for _, word, _ in pickletools.genops(data) if word is not None}
    assert {"code_of_text", "code_of_expression"} <= words
    assert not {"CodeType", "_code_reduce"} & words
    for name in ("fibonacci", "train"):
        code = getattr(sys.modules["__main__"], name).__code__
        assert code.co_code not in data


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("exec('def f(): return 1')\ndef train():\n    return f()\ntrain()", id="exec"),
        pytest.param("def f():\n    return 1\nf.__code__ = f.__code__.replace(co_consts=(None, 2))\ndef train():\n    return f()\ntrain()", id="changed"),
        pytest.param("def train():\n    try:\n        return 1\n    except* ValueError:\n        pass\ntrain()", id="newer syntax", marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="is an error here")),
        pytest.param("numbers = (i for i in range(3))\ndef outer(n):\n    def train():\n        return list(n)\n    return train\n"
            "train = outer(numbers)\ntrain()", id="generator"),
    ],
)  # fmt: skip
def test_what_can_not_travel_is_named(text, golden):
    with pytest.raises(PayloadError) as caught:
        packed(text, 10)
    golden(str(caught.value).replace(OURS, "python3.x"))


def test_the_cure_names_a_python_of_the_notebook_s_version(golden):
    with pytest.raises(PayloadError) as caught:
        packed("exec('def f(): return 1')\nf()", 10)
    golden(str(caught.value).replace(OURS, "python3.x"))
