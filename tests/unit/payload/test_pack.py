"""From a call to the files that travel: what is in them, that a rank can run them, and what is refused."""

from __future__ import annotations

import functools
import importlib
import json
import linecache
import re
import socket
import sys
import textwrap
import threading
import types
import warnings
import zipfile
from concurrent.futures import Future
from pathlib import Path

import pytest
from traitlets.config import Config

from distmagic.errors import PayloadError
from distmagic.payload import local_modules, pack
from distmagic.payload.refused import _FRAMEWORKS, MadeAlone, refuse
from distmagic.payload.work_files import with_tree
from distmagic.remote.records import manifest
from tests.builders.later import Later
from tests.builders.ranks import CELL, cell, on_a_rank
from tests.system.packages import folder_of

torch = Later("torch")
LIMIT = 256 << 20


def packed(thunk, limit_bytes: int = LIMIT) -> pack.Payload:
    return pack.pack_call(
        thunk,
        limit_bytes=limit_bytes,
        labels={CELL: "Cell In[3]", "other": "Cell In[9]"},
    )


def refused(thunk, limit_bytes: int = LIMIT) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        packed(thunk, limit_bytes)
    return caught.value


def gives_the_same_on_a_rank(source: str, look: str, tmp_path: Path) -> None:
    text = f"{textwrap.dedent(source)}\n{look}"
    assert on_a_rank(packed(cell(text)), tmp_path) == str(cell(text)())


def names_in(payload: pack.Payload) -> list[str]:
    """Return the Python files that hosts get in their working directory."""
    tree = with_tree(payload, None, Path.cwd()).tree
    if tree is None:
        return []
    files = manifest.decode(tree.listed.path.read_bytes()).files
    return [file.path for file in files if file.path.endswith(".py")]


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Make modules beside the notebook."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)

    def write(**texts: str) -> Path:
        for name, text in texts.items():
            inner = name if "/" in name else name.replace("__", "/")
            file = folder / f"{inner}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        importlib.invalidate_caches()
        return folder

    yield write
    for name in set(sys.modules) - before:
        if str(folder) in str(
            getattr(sys.modules[name], "__file__", "")
            or getattr(sys.modules[name], "__path__", "")
        ):
            del sys.modules[name]


# ---- what travels


@pytest.mark.slow
def test_a_call_with_its_functions_values_and_sources_runs_on_a_rank(
    tmp_path, torch_forks
):
    thunk = cell("scale = 2\ndef double(x):\n    return x * scale\ndef train(x):\n    return double(x).sum().item()\n"
                 "train(data)", data=torch.arange(4))  # fmt: skip
    payload = packed(thunk)
    with zipfile.ZipFile(payload.code.path) as archive:
        sources = json.loads(archive.read("sources.json"))
    assert list(sources["texts"]) == [CELL]
    assert "def double" in sources["texts"][CELL]
    assert sources["labels"] == {CELL: "Cell In[3]"}
    assert on_a_rank(payload, tmp_path, forks=torch_forks) == "12"


def test_equal_calls_give_equal_files():
    thunk = cell("def train():\n    return 1\ntrain()")
    assert packed(thunk) == packed(thunk)
    payload = packed(thunk)
    assert payload.call.path.name == payload.call.blob.sha256
    assert payload.call.path.stat().st_size == payload.call.blob.size_bytes
    assert [
        path.name[0]
        for path in payload.call.path.parent.iterdir()
        if path.name.startswith(".")
    ] == []


def test_functions_of_several_cells_bring_their_texts():
    cell("def old():\n    return 1\n0", "<first cell>")
    names: dict = {"__name__": "__main__"}
    exec(
        compile(
            linecache.cache["<first cell>"][2][0] + "    return 1",
            "<first cell>",
            "exec",
        ),
        names,
    )
    payload = packed(cell("def train():\n    return old()\ntrain()", old=names["old"]))
    with zipfile.ZipFile(payload.code.path) as archive:
        assert set(json.loads(archive.read("sources.json"))["texts"]) == {
            CELL,
            "<first cell>",
        }


def test_a_whole_cell_brings_its_text_and_modules(beside, tmp_path):
    beside(mine="VALUE = 40\n")
    text = "# %%distributed --whole\nimport mine\nmine.VALUE + 2"
    payload = pack.pack_whole(
        text, filename=CELL, labels={CELL: "Cell In[3]"}, limit_bytes=LIMIT
    )
    assert names_in(payload) == ["mine.py"]
    assert "mine" not in sys.modules
    with zipfile.ZipFile(payload.code.path) as archive:
        assert json.loads(archive.read("sources.json")) == {
            "labels": {CELL: "Cell In[3]"}, "texts": {CELL: text}, "roots": [str(tmp_path / "project")],
            "python": list(sys.version_info[:2]), "may_be_loaded": None, "imports": ["mine"],
        }  # fmt: skip
    assert on_a_rank(payload, tmp_path) == "42"


def test_plain_python_with_a_partial(tmp_path):
    names: dict = {"__name__": "__main__"}
    exec("def train(a, *, b):\n    return a + b", names)
    assert (
        on_a_rank(packed(functools.partial(names["train"], 40, b=2)), tmp_path) == "42"
    )


def test_tqdm_travels_by_name_and_a_host_without_it_uses_the_fallback(
    tmp_path, monkeypatch
):
    importlib.import_module("IPython")
    monkeypatch.setitem(
        sys.modules, "ipykernel.zmqshell", types.ModuleType("ipykernel.zmqshell")
    )
    for name in ("tqdm.auto", "tqdm.autonotebook"):  # choose again, as in a notebook
        monkeypatch.delitem(sys.modules, name, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # autonotebook calls itself experimental
        auto, autonotebook = (
            importlib.import_module(f"tqdm.{name}") for name in ("auto", "autonotebook")
        )
    assert autonotebook.tqdm.__name__ == "tqdm_notebook"
    source = "def train():\n    return [c.__module__ + '.' + c.__name__ for c in (one, two, three, four)]\ntrain()"
    plain = importlib.import_module("tqdm").tqdm
    payload = packed(
        cell(
            source, one=auto.tqdm, two=autonotebook.tqdm, three=auto.trange, four=plain
        )
    )
    assert names_in(payload) == []
    assert b"ipywidgets" not in payload.call.path.read_bytes()
    # -S hides what is installed: tqdm comes out of the bundle, and has no widgets there
    shown = on_a_rank(payload, tmp_path, "-I", "-S", "-W", "ignore")
    assert eval(shown)[1:] == [
        "tqdm.notebook.tqdm_notebook",
        "tqdm.auto.trange",
        "tqdm.std.tqdm",
    ]


def test_distmagic_travels_by_name(tmp_path):
    import distmagic

    source = "def train(x=None):\n    report(step=1)\n    return distmagic.__name__, report.__module__\ntrain()"
    payload = packed(cell(source, distmagic=distmagic, report=distmagic.report))
    assert names_in(payload) == []
    assert (
        on_a_rank(payload, tmp_path) == "('distmagic', 'distmagic.remote.rank.report')"
    )


def test_children_of_a_whole_cell_find_its_definitions(tmp_path):
    source = (
        "import multiprocessing\ndef double(x):\n    return 2 * x\ndef train():\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        return pool.map(double, [1, 21])\ntrain()"
    )
    payload = pack.pack_whole(source, filename=CELL, labels={}, limit_bytes=LIMIT)
    assert on_a_rank(payload, tmp_path) == "[2, 42]"


# Classes with an attribute that is the same object as a base's, though another base comes first; and what to look at.
OWN_ATTRIBUTES = {
    "of the second base": (
        """
        class Grand:
            flag = True
            def forward(self): return "grand"
        class Parent(Grand): pass
        class Mixin:
            flag = False
            def forward(self): return "mixin"
        class Own(Parent, Mixin):
            flag = False
            forward = Mixin.forward
        """,
        "Own.flag, Own().forward()",
    ),
    "of the only base, which changes later": (
        """
        class Base:
            lr = 1
        class Own(Base):
            lr = 1
        """,
        "setattr(Base, 'lr', 2), Own.lr",
    ),
    "of a module of torch": (
        """
        import torch
        class Base(torch.nn.Module):
            def forward(self, x): return "base"
        class Trunk(Base): pass
        class Head:
            def forward(self, x): return "head"
        class Own(Trunk, Head):
            forward = Head.forward
        """,
        "Own()(1)",
    ),
    "of a dataclass": (
        """
        from dataclasses import dataclass
        @dataclass
        class Grand:
            eval: bool = True
        @dataclass
        class Parent(Grand):
            lr: float = 1.0
        @dataclass
        class Mixin:
            eval: bool = False
        @dataclass
        class Own(Parent, Mixin):
            eval: bool = False
        """,
        "Own().eval, Own.eval",
    ),
    "of an enumeration": (
        """
        import enum
        class Words:
            def words(self): return "words"
        class Base(Words, enum.Enum):
            def words(self): return "base"
        class Own(Base):
            words = Base.words
            A = 1
        class Text(str, enum.Enum):
            TRAIN = "train"
            __str__ = str.__str__
        class Level(enum.IntFlag):
            LOW = 1
            HIGH = 2
        """,
        "Own.A.words(), str(Text.TRAIN), Level.LOW | Level.HIGH, Text('train') is Text.TRAIN",
    ),
    "with slots, an abstract class and a protocol": (
        """
        import abc, typing
        class Empty:
            __slots__ = ()
        class Shape(abc.ABC):
            __slots__ = ()
            @abc.abstractmethod
            def area(self): ...
        class Own(Empty, Shape):
            __slots__ = ("x",)
            def area(self): return 3
        class HasArea(typing.Protocol):
            def area(self): ...
        class HasName(HasArea, typing.Protocol):
            name: str
        class Row(typing.NamedTuple):
            a: int = 3
        class Sized(Row):
            __slots__ = ()
        """,
        "Row()._replace(a=5), Sized(), Own().area(), hasattr(Own(), '__dict__'), HasName._is_protocol, HasName.__doc__",
    ),
    "of a typed dict of a typed dict": (
        """
        import typing
        class Options(typing.TypedDict):
            lr: float
        class More(Options, total=False):
            seed: int
        class Most(More):
            name: str
        """,
        "Most(lr=1.0), sorted(Most.__required_keys__), sorted(Most.__optional_keys__), More.__total__, typing.get_type_hints(Most)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_ATTRIBUTES)
def test_a_class_keeps_attributes_that_are_also_those_of_a_base(name, tmp_path):
    source, look = OWN_ATTRIBUTES[name]
    thunk = cell(f"{textwrap.dedent(source)}\n{look}")
    assert on_a_rank(packed(thunk), tmp_path) == str(thunk())


# Functions that share variables of a function around them, and a call that counts by them.
SHARED_VARIABLES = {
    "two functions": (
        """
        def meter():
            total, count = 0.0, 0
            def add(x):
                nonlocal total, count
                total, count = total + x, count + 1
            def mean(): return total / max(count, 1)
            return add, mean
        add, mean = meter()
        other_add, other_mean = meter()
        """,
        "add(4.0), add(2.0), other_add(1.0), mean(), other_mean()",
    ),
    "an attribute of a wrapper": (
        """
        import functools
        def counted(function):
            n = 0
            @functools.wraps(function)
            def wrapper(*args):
                nonlocal n
                n += 1
                return function(*args), n
            def reset():
                nonlocal n
                n = 0
            wrapper.reset = reset
            return wrapper
        @counted
        def step(x): return x
        """,
        "step(1), step(2), step.reset(), step(3)",
    ),
    "methods of a class": (
        """
        def meter():
            total = 0.0
            class Meter:
                def __init__(self): super().__init__()
                def add(self, x):
                    nonlocal total
                    total += x
                def sum(self): return total, type(self) is __class__
            return Meter()
        meter = meter()
        """,
        "meter.add(4.0), meter.add(2.0), meter.sum()",
    ),
    "a function that calls itself, and one that is set later": (
        """
        def make():
            def count(n): return 0 if n == 0 else 1 + count(n - 1)
            def call(): return later()
            def replace():
                nonlocal count, later
                old, count = count, lambda n: 100
                later = lambda: 5
                return old
            return count, call, replace
            later = None
        count, call, replace = make()
        """,
        "count(3), replace()(3), call()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED_VARIABLES)
def test_functions_share_the_variables_that_they_share_here(name, tmp_path):
    gives_the_same_on_a_rank(*SHARED_VARIABLES[name], tmp_path)


# Objects whose class does more than pickle expects, and what a call sees of them.
OWN_CLASSES = {
    "containers with an own __init__ or __setitem__": (
        """
        from collections import Counter, OrderedDict, defaultdict, deque
        class Cache(OrderedDict):
            def __init__(self, size=2): self.size = size
            def __setitem__(self, key, value):
                super().__setitem__(key, value)
                if len(self) > self.size: self.popitem(last=False)
        class Vocab(Counter):
            def __init__(self, text, unknown):
                super().__init__(text.split())
                self.unknown = unknown
        class Meter(defaultdict):
            def __init__(self): super().__init__(list)
        class Strict(dict):
            def __init__(self, *allowed): self.allowed = allowed
            def __setitem__(self, key, value):
                if key in self.allowed: super().__setitem__(key, value)
        class History(list):
            def __init__(self, name): self.name, self.total = name, 0
            def append(self, x):
                self.total += x
                super().append(x)
            extend = None
        class Tags(set):
            def __init__(self, name, tags):
                super().__init__(tags)
                self.name = name
        class Window(deque):
            def __init__(self, size, name):
                super().__init__(maxlen=size)
                self.name = name
        cache, vocab, meter, strict = Cache(3), Vocab("a b a", "?"), Meter(), Strict("lr")
        history, tags, window = History("loss"), Tags("t", "ab"), Window(2, "w")
        for n in range(5):
            cache[n] = n
            history.append(n)
            window.append(n)
        cache.move_to_end(2)
        meter["a"].append(1)
        strict["lr"] = 1
        """,
        ("list(cache), cache.size, vocab['a'], vocab.unknown, meter, meter['b'], strict, strict.allowed, "
        "history, history.total, history.name, sorted(tags), tags.name, window, window.name"),
    ),
    "an own __new__": (
        """
        from collections import namedtuple
        class Unit(float):
            def __new__(cls, value, unit):
                made = super().__new__(cls, value)
                made.unit = unit
                return made
        class Pair(namedtuple("Pair", "x y")):
            def __new__(cls, x): return super().__new__(cls, x, 2 * x)
        class Config:
            def __new__(cls, lr):
                made = super().__new__(cls)
                made.lr = lr
                return made
        class Single:
            only = None
            def __new__(cls):
                if cls.only is None: cls.only = super().__new__(cls)
                return cls.only
        unit, pair, config, single = Unit(3.0, "s"), Pair(2), Config(0.5), Single()
        """,
        "unit * 2, unit.unit, pair, config.lr, single is Single()",
    ),
    "attributes that are its own items": (
        """
        class Options(dict):
            def __init__(self, **options):
                super().__init__(**options)
                self.__dict__ = self
        options = Options(lr=1)
        def fit():
            options.lr, options["seed"] = 5, 7
            return options, options.seed
        """,
        "fit()",
    ),
    "__init_subclass__ and a metaclass, which use the class": (
        """
        class Named:
            def __init_subclass__(cls, *, key):
                cls.key = key, cls.name
        class Net(Named, key="k"):
            name = "net"
        class Counted(type):
            def __new__(meta, name, bases, names, *, tag):
                made = super().__new__(meta, name, bases, names)
                made.count = len(names["fields"]), tag
                return made
            def __init__(cls, name, bases, names, *, tag): super().__init__(name, bases, names)
            def __len__(cls): return 3
        class Row(metaclass=Counted, tag="t"):
            fields = ["a", "b"]
        def fit():
            class Other(Named, key="other"):
                name = "o"
            return Other.key
        """,
        "Net.key, Net().name, Row.count, len(Row), type(Row).__name__, fit()",
    ),
    "objects that are keys, by an own __hash__": (
        """
        from dataclasses import dataclass
        class Token:
            known = {}
            def __init__(self, text): self.text = text
            def __hash__(self): return hash(self.text)
            def __eq__(self, other): return self.text == other.text
            def number(self): return numbers[self], Token.known[self]
        @dataclass(frozen=True)
        class Size:
            n: int
            all = set()
            def __post_init__(self): Size.all.add(self)
        numbers = {Token("a"): 1}
        Token.known[Token("a")], size = 2, Size(3)
        """,
        "Token('a').number(), Size(3) in Size.all, len(Size.all)",
    ),
    "an enumeration with a metaclass, and a cached function with attributes": (
        """
        import enum, functools
        class Meta(enum.EnumMeta):
            def __getitem__(cls, name): return super().__getitem__(name.upper())
        class Kind(enum.Enum, metaclass=Meta):
            A = 1
        table = {}
        def register(function):
            table[function.__name__] = function
            function.tag = len(table)
            return function
        @register
        @functools.lru_cache
        def load(): return 5
        """,
        "Kind['a'], load.tag, load(), table['load'] is load, load.cache_info().hits",
    ),
    "weak references of other kinds": (
        """
        import weakref
        class Node:
            def __init__(self, n): self.n, self.kids, self.parent = n, [], None
            def double(self): return 2 * self.n
        root, kid = Node(1), Node(2)
        kid.parent, root.parent = weakref.proxy(root), weakref.proxy(Node(3))
        root.kids.append(kid)
        method, gone = weakref.WeakMethod(root.double), weakref.WeakMethod(Node(4).double)
        def is_dead():
            try: return root.parent.n
            except ReferenceError: return True
        def fit():
            kid.parent.n = 7
            return root.n, root.kids[0] is kid, method()(), gone(), is_dead()
        """,
        "fit()",
    ),
    "one state that all objects of a class share": (
        """
        settings = {"lr": 1}
        class Borg:
            state = {}
            def __init__(self, **more):
                self.__dict__ = self.state
                self.__dict__.update(more)
            def __getattr__(self, name): raise AttributeError(name)
        class Kid(Borg): pass
        class Settings:
            def __init__(self): self.__dict__ = settings
        class Made:
            state = {}
            def __new__(cls, *args):
                made = super().__new__(cls)
                made.__dict__ = cls.state
                return made
        one, kid, made, current = Borg(n=1), Kid(), Made(), Settings()
        def fit():
            kid.n, made.n, current.lr = 2, 3, 4
            return one.n, Borg().n, Borg.state, Made().n, settings
        """,
        "fit()",
    ),
    "a __dict__ that methods use": (
        """
        import dataclasses, enum, typing
        class Config(typing.Generic[typing.TypeVar("T")]):
            def __init__(self, **values): self.__dict__.update(values)
            def __setattr__(self, name, value): raise TypeError
        @dataclasses.dataclass
        class Point:
            x: int = 1
            def values(self): return self.__dict__
        class Color(enum.Enum):
            RED = 1
            def values(self): return sorted(self.__dict__)
        config, point, color = Config(lr=1), Point(3), Color.RED
        config.__dict__["me"] = config
        def fit(): return config.lr, config.me is config, point.values(), point == Point(3), color is Color.RED, color.values()
        """,
        "fit()",
    ),
    "submodules that inner code names": (
        """
        import wsgiref.util, xml.dom.minidom
        def fit():
            def parse(text): return xml.dom.minidom.parseString(text).documentElement.tagName
            return parse("<a/>"), [wsgiref.util.guess_scheme({}) for _ in "ab"]
        """,
        "fit()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_CLASSES)
def test_objects_of_classes_with_their_own_ways_travel(name, tmp_path):
    gives_the_same_on_a_rank(*OWN_CLASSES[name], tmp_path)


TRAINED = """
import torch
class Clipping(torch.optim.SGD):
    def __init__(self, parameters, clip):
        super().__init__(parameters, lr=1.0)
        self.clip, self.inner = clip, torch.optim.Adam(self.param_groups)
    def step(self, closure=None):
        for group in self.param_groups:
            torch.nn.utils.clip_grad_value_(group["params"], self.clip)
        return super().step(closure)
def net():
    made = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(made.weight)
    return made
hooked, clipped, noted, at_once = net(), net(), net(), net()
handle = hooked.weight.register_hook(lambda grad: grad * 10)
leaf = torch.ones(2, requires_grad=True)
leaf.register_hook(lambda grad: grad * 3)
clipping = Clipping(clipped.parameters(), 0.25)
steps = []
plain = torch.optim.SGD(noted.parameters(), lr=1.0)
plain.register_step_post_hook(lambda *_: steps.append(len(steps)))
schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
each = {p: torch.optim.SGD([p], lr=1.0) for p in at_once.parameters()}
for p in each:
    p.register_post_accumulate_grad_hook(lambda p: each[p].step())
def fit():
    x = torch.ones(1, 2)
    for one in (hooked, clipped, noted, at_once): one(x).sum().backward()
    leaf.sum().backward()
    clipping.step()
    plain.step()
    schedule.step()
    handle.remove()
    before = hooked.weight.grad.tolist()
    hooked(x).sum().backward()
    return (before, hooked.weight.grad.tolist(), leaf.grad.tolist(), clipped.weight.tolist(), steps,
            at_once.weight.tolist(), clipping.inner.param_groups[0]["params"][0] is clipped.weight, plain.param_groups[0]["lr"])
fit()"""


@pytest.mark.slow
def test_hooks_of_parameters_and_attributes_of_optimizers_travel(tmp_path, torch_forks):
    payload = packed(cell(TRAINED))
    expected = str(cell(TRAINED)())
    assert on_a_rank(payload, tmp_path, forks=torch_forks) == expected


def test_an_optimizer_travels_without_an_attribute_that_cannot(tmp_path, torch_forks):
    source = """
    import threading, torch, weakref
    net = torch.nn.Linear(2, 1)
    fused = torch.optim.SGD(net.parameters(), lr=0.5)
    fused.kernel, fused.clip, fused.net = threading.Lock(), 0.25, weakref.ref(net)
    def fit(): return fused.clip, fused.net() is net, hasattr(fused, "kernel"), fused.param_groups[0]["lr"]
    fit()"""
    payload = packed(cell(textwrap.dedent(source)))
    found = on_a_rank(payload, tmp_path, forks=torch_forks)
    assert found == "(0.25, True, False, 0.5)"


DEVICES = {
    "chosen in a cell": ("device = 'cpu'\ndef fit(): return device", "device is cpu"),
    "of torch": (
        "import torch\nDEVICE = torch.device('cpu')\ndef fit(): return DEVICE",
        "DEVICE is cpu",
    ),
    "of a Mac": (
        "device = 'mps'\nclass Net:\n    def to(self): return device\ndef fit(): return Net",
        "device is mps",
    ),
    "an argument": (
        "where = 'cpu'\ndef fit(x=3): return [x for one in where]",
        "where is cpu",
    ),
    "of a dict": (
        "cfg = {'lr': 1, 'device': 'cpu'}\ndef fit(): return cfg",
        "cfg['device'] is cpu",
    ),
    "of a class": (
        "class Config:\n    device = 'cpu'\nc = Config()\ndef fit(): return c.device",
        "c.device is cpu",
    ),
    "of arguments": (
        "import argparse\na = argparse.Namespace(device='cpu')\ndef fit(): return a",
        "a.device is cpu",
    ),
    "of a module": (
        "import json as config\nconfig.device = 'cpu'\ndef fit(): return config",
        "",
    ),
    "a backend": ("backend = 'gloo'\ndef fit(): return backend", "backend is gloo"),
    "a place to load to": (
        "map_location = 'cpu'\ndef fit(load=len): return load(map_location)",
        "",
    ),
    "a GPU": ("device = 'cuda'\ndef fit(): return device", ""),
    "meant to be the CPU": ("cpu = 'cpu'\ndef fit(): return cpu", ""),
    "an attribute": ("device = 'cpu'\ndef fit(x=None): return x and x.device", ""),
    "chosen on the rank": (
        "device = 'cpu'\ndef fit():\n    device = 'cuda'\n    return device",
        "",
    ),
}


@pytest.mark.parametrize("name", DEVICES)
def test_the_device_that_was_chosen_in_the_notebook_is_known(name, monkeypatch):
    """`device = "cuda" if torch.cuda.is_available() else "cpu"` on a laptop keeps ranks off the GPUs of their hosts."""
    monkeypatch.setattr(json, "device", "cpu", raising=False)  # each rank imports it
    source, device = DEVICES[name]
    assert packed(cell(f"{source}\nfit()")).device == device


EXECUTED = """
STEP = 1
def helper(): return 10
def count():
    global STEP
    STEP += 1
    return STEP
def both(): return STEP, helper(), count()
"""


def test_functions_of_a_program_that_run_has_executed_keep_its_globals(tmp_path):
    """Its names become names of the notebook, which then has others of these names: lr, batch_size."""
    executed = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(EXECUTED, "/work/tools.py", "exec"), executed)
    source = "STEP = 7\ndef helper(): return 20\ndef fit(): return both(), STEP, helper(), count()\nfit()"
    program = packed(cell(source, both=executed["both"], count=executed["count"]))
    assert on_a_rank(program, tmp_path) == "((1, 10, 2), 7, 20, 3)"


INSIDE = """
import copy, pickle
class Config:
    class Model:
        depth = 3
        def __eq__(self, other): return type(other) is type(self)
def fit():
    one = Config.Model()
    return pickle.loads(pickle.dumps(one)) == one, copy.deepcopy(one) == one, Config.Model.__qualname__
fit()"""


def test_a_class_inside_a_class_can_be_pickled_on_a_rank(tmp_path):
    printed = on_a_rank(packed(cell(INSIDE)), tmp_path)
    assert printed == "(True, True, 'Config.Model')"


OF_A_CLASS = """
import torch
class Scaled(torch.nn.Parameter):
    def __new__(cls, data, scale):
        self = super().__new__(cls, data, requires_grad=False)
        self.scale = scale
        return self
    def whole(self): return (self * self.scale).tolist()
net = torch.nn.Linear(2, 1, bias=False)
net.weight = Scaled(net.weight.detach().fill_(1.0), 3)
net.weight.net = net
trained = Scaled(torch.ones(1), 4).requires_grad_()
trained.register_hook(lambda grad: grad * 10)
def fit():
    trained.sum().backward()
    one = next(net.parameters())
    return type(one) is Scaled, one.whole(), one.requires_grad, one.net is net, type(trained).__name__, trained.grad.tolist()
fit()"""


@pytest.mark.slow
def test_a_parameter_keeps_its_class_and_attributes(tmp_path, torch_forks):
    expected = str(cell(OF_A_CLASS)())
    payload = packed(cell(OF_A_CLASS))
    assert on_a_rank(payload, tmp_path, forks=torch_forks) == expected


def test_a_sparse_parameter_of_another_class_travels(tmp_path, torch_forks):
    source = """
    import torch
    class Table(torch.nn.Parameter): pass
    table = Table(torch.eye(2).to_sparse())
    def fit(): return table.requires_grad, table.to_dense().tolist()
    fit()"""
    payload = packed(cell(textwrap.dedent(source)))
    found = on_a_rank(payload, tmp_path, forks=torch_forks)
    assert found == "(True, [[1.0, 0.0], [0.0, 1.0]])"


GRADIENTS = """
import torch
net, leaf = torch.nn.Linear(2, 1, bias=False), torch.ones(2, requires_grad=True)
inner = leaf * 1.0
net(inner).sum().backward()
def fit():
    return net.weight.{grad}.tolist(), (leaf + 0).tolist()
fit()"""


@pytest.mark.slow
def test_gradients_travel_where_the_code_looks_at_them(tmp_path, torch_forks):
    payload = packed(cell(GRADIENTS.replace("{grad}", "grad")))
    assert (
        on_a_rank(payload, tmp_path, forks=torch_forks) == "([[1.0, 1.0]], [1.0, 1.0])"
    )


def test_gradients_that_the_code_does_not_name_stay_with_the_notebook():
    """They would double a model that was tried in the notebook."""
    text = GRADIENTS.replace(".{grad}", "")
    model = (
        "net = torch.nn.Linear(1000, 1000)\nleaf = torch.ones(1000, requires_grad=True)"
    )
    text = text.replace(text.splitlines()[2], model)
    assert sum(one.blob.size_bytes for one in packed(cell(text)).blobs) < 6_000_000


def test_a_hook_that_refers_to_the_whole_model_is_tried_without_it(monkeypatch):
    """One a parameter, as where each steps its own optimizer: a model of 1 GB would be copied hundreds of times."""
    tried = []
    reduce = torch.Tensor.__reduce_ex__
    monkeypatch.setattr(
        torch.Tensor, "__reduce_ex__", lambda self, *how: tried.append(self) or reduce(self, *how)
    )  # fmt: skip
    packed(cell(HOOKED))
    assert len(tried) <= 2 * 8


HOOKED = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
each = {p: torch.optim.SGD([p], lr=1.0) for p in model.parameters()}
for p in each:
    p.register_post_accumulate_grad_hook(lambda p: each[p].step())
def fit(): return model, each
fit()"""


OF_TORCH = """
import torch
from torch.nn.utils import parametrizations, parametrize
class Symmetric(torch.nn.Module):
    def forward(self, x): return x.triu() + x.triu(1).T
def parametrized():
    net = torch.nn.Linear(2, 2)
    parametrize.register_parametrization(net, "weight", Symmetric())
    return net
net, normed = parametrized(), parametrizations.weight_norm(torch.nn.Linear(2, 2))
spectral = parametrizations.spectral_norm(torch.nn.Linear(2, 2))
numbers, whole, kept = torch.finfo(torch.float16), torch.iinfo(torch.int8), {torch.ops.aten.relu.default, torch.ops.aten.mm}
def fit():
    with torch.no_grad(): normed.parametrizations.weight.original0.fill_(2.0)
    sizes = [round(one, 3) for one in normed.weight.norm(dim=1).tolist()]
    net.weight.sum().backward()
    return (torch.equal(net.weight, net.weight.T), sizes, spectral(torch.ones(1, 2)).shape, type(net).__name__,
            isinstance(net, torch.nn.Linear), net.parametrizations.weight.original.grad is not None,
            numbers.max, whole.max, torch.ops.aten.relu.default in kept, torch.ops.aten.mm in kept)
fit()"""


@pytest.mark.slow
def test_objects_that_torch_can_not_pickle_travel(tmp_path, torch_forks):
    expected = str(cell(OF_TORCH)())
    assert on_a_rank(packed(cell(OF_TORCH)), tmp_path, forks=torch_forks) == expected


# ---- local modules


# Files beside the notebook, a cell that prints 42 by them, and the Python files that travel.
MODULES = {
    "with those that they import": (
        {"first": "import second\ndef f():\n    return second.VALUE\n", "second": "import json, yaml\nVALUE = 42\n", "third": ""},
        "import first\ndef train():\n    return first.f()\ntrain()",
        ["first.py", "second.py"],
    ),
    "imported in a function": (
        {"lazy": "VALUE = 42\n"},
        "def train():\n    def inner():\n        from lazy import VALUE\n        return VALUE\n    return inner()\ntrain()",
        ["lazy.py"],
    ),
    "a whole package": (
        {"pkg/__init__": "", "pkg/a": "from . import b\nfrom .sub.c import VALUE\n", "pkg/b": "", "pkg/sub/c": "VALUE = 42\n", "pkg/.hidden/x": ""},
        "from pkg.a import VALUE\nimport pkg.a\ndef train():\n    return pkg.a.VALUE\ntrain()",
        ["pkg/.hidden/x.py", "pkg/__init__.py", "pkg/a.py", "pkg/b.py", "pkg/sub/c.py"],
    ),
    "a namespace package": (
        {"space/inner/mod": "class Model:\n    value = 42\n"},
        "from space.inner.mod import Model\nmodel = Model()\ndef train():\n    return model.value\ntrain()",
        ["space/inner/mod.py"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules_beside_the_notebook_travel(name, beside, tmp_path):
    files, source, names = MODULES[name]
    beside(**files)
    payload = packed(cell(source))
    assert names_in(payload) == names
    assert on_a_rank(payload, tmp_path) == "42"


def test_a_module_that_hides_one_of_python_travels(beside, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    beside(this="def evaluate():\n    return 42")
    payload = packed(
        cell("import this\ndef train():\n    return this.evaluate()\ntrain()")
    )
    assert names_in(payload) == ["this.py"]
    assert on_a_rank(payload, tmp_path) == "42"


@pytest.fixture
def by_path(beside, monkeypatch):
    """Load a file beside the notebook as a module of another name."""
    folder = beside(
        conf__base="import json\nimport threading\n"
        "class Plan:\n    def __init__(self, steps): self.steps = steps\n"
        "class Long(Plan): pass\n"
        "def double(n): return 2 * n\ndef text(n): return json.dumps(double(n))"
    )

    def load(name: str):
        path = folder / "conf/base.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("name", ["my_plan", "exp-01.cfg", "exp.base", "conf"])
def test_a_module_that_was_loaded_by_its_path_travels(name, by_path, tmp_path):
    assert local_modules.loaded_by_path() == []
    module = by_path(name)
    assert local_modules.loaded_by_path() == [name]
    names = {"module": module, "plan": module.Long(5), "double": module.double}
    source = """
import sys, importlib
def fit(f):
    again = importlib.import_module("NAME") is module
    return plan.steps, type(plan) is module.Long, f(4), double(2), module.text(1), again
fit(module.double)""".replace("NAME", name if "." not in name else "json")
    payload = packed(cell(source, **names))
    again = "." not in name
    assert on_a_rank(payload, tmp_path) == f"(5, True, 8, 4, '2', {again})"


def test_an_import_in_the_function_finds_a_module_that_was_loaded_by_its_path(
    by_path, tmp_path
):
    source = "def fit():\n    import my_plan\n    return my_plan.double(4)\nfit()"
    payload = packed(cell(source, loaded=by_path("my_plan")))
    assert on_a_rank(payload, tmp_path) == "8"


def test_modules_that_an_import_finds_go_by_their_names(beside, monkeypatch):
    import transformers

    assert transformers
    folder = beside(space__sub="", mapped__lib="")
    importlib.import_module("space.sub")

    class Finder:
        """As that of an editable install which names a package's folder."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "of_another_folder":
                file = folder / "mapped/lib.py"
                return importlib.util.spec_from_file_location(name, file)
            return None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    importlib.import_module("of_another_folder")
    assert local_modules.loaded_by_path() == []


def test_a_module_that_is_loaded_again_by_its_path_is_seen(beside, by_path):
    beside(my_plan="")
    importlib.import_module("my_plan")
    assert local_modules.loaded_by_path() == []
    by_path("my_plan")
    assert local_modules.loaded_by_path() == ["my_plan"]


def test_what_is_on_disk_travels(beside, tmp_path):
    folder = beside(edited="def f():\n    return 1\n")
    thunk = cell("import edited\ndef train():\n    return edited.f()\ntrain()")
    (folder / "edited.py").write_text("def f():\n    return 42\n")
    assert on_a_rank(packed(thunk), tmp_path) == "42"


def test_installed_packages_are_not_sent():
    import numpy as np

    assert (
        names_in(
            packed(
                cell(
                    "def train():\n    import yaml, pytest\n    return numpy.pi\ntrain()",
                    numpy=np,
                )
            )
        )
        == []
    )


def test_a_package_that_is_too_large_is_named(beside, monkeypatch):
    beside(huge__a="", huge__b="", huge__c="")
    monkeypatch.setattr(local_modules, "MAX_FILES", 2)
    error = refused(cell("def train():\n    import huge\ntrain()"))
    assert "local package 'huge'" in error.message
    assert "Install it on the hosts" in error.hint
    monkeypatch.setattr(local_modules, "MAX_FILES", 2000)
    monkeypatch.setattr(local_modules, "MAX_BYTES", -1)
    assert (
        "local package 'huge'"
        in refused(cell("def train():\n    import huge\ntrain()")).message
    )


# ---- what can't travel


def test_a_variable_that_cannot_be_pickled_is_named(golden):
    error = refused(
        cell("def train():\n    return lock\ntrain()", lock=threading.Lock())
    )
    golden(error)


def _jit():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch retires TorchScript
        return torch.jit.script(_twice)


def _compiled():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Another backend is loaded where it is named.
        return torch.compile(_twice, backend="eager")


def _twice(x: int) -> int:
    return 2 * x


def _widget():
    return importlib.import_module("ipywidgets").IntSlider()


def _shell():
    config = Config(HistoryManager={"hist_file": ":memory:"})
    return importlib.import_module("IPython.core.interactiveshell").InteractiveShell(
        config=config
    )


CULPRITS = {
    "lock": threading.RLock,
    "event": threading.Event,
    "text file": Path(__file__).open,
    "bytes file": lambda: Path(__file__).open("rb"),  # noqa: SIM115
    "generator": lambda: (i for i in range(3)),
    "socket": socket.socket,
    "jit": _jit,
    "compiled": _compiled,
    "widget": _widget,
    "get_ipython": lambda: importlib.import_module("IPython").get_ipython,
    "bar": lambda: importlib.import_module("tqdm").tqdm(disable=True),
}


@pytest.mark.parametrize("name", CULPRITS)
def test_known_kinds_are_named_with_their_cure(name, golden):
    thing = CULPRITS[name]()
    try:
        error = refused(
            cell(
                "def helper():\n    return thing\ndef train():\n    return helper()\ntrain()",
                thing=thing,
            )
        )
    finally:
        getattr(thing, "close", lambda: None)()
    golden(error)


class Users:
    """An object of the user's own class."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


FUTURE = "a concurrent.futures._base.Future, which holds a threading.Condition (`{}._condition`)."


@pytest.mark.parametrize(
    ("make", "path", "words"),
    [
        (Future, "thing", FUTURE),
        (lambda: types.SimpleNamespace(all=[Future()]), "thing.all[0]", FUTURE),
        (lambda: Users(_job=Future()), "thing._job", FUTURE),
        (lambda: Users(_lock=threading.Lock()), "thing._lock", "a lock, which can't be pickled."),
    ],
)  # fmt: skip
def test_a_private_part_of_a_librarys_object_is_named_by_the_object(make, path, words):
    source = (
        "def helper():\n    return thing\ndef train():\n    return helper()\ntrain()"
    )
    error = refused(cell(source, thing=make()))
    assert error.message == f"helper uses `{path}`, {words.format(path)}"


@pytest.mark.slow
def test_a_data_loader_that_was_looked_at_travels_without_its_workers(tmp_path):
    loader = torch.utils.data.DataLoader(
        list(range(8)), num_workers=1, persistent_workers=True
    )
    next(iter(loader))
    there = packed(cell("def count():\n    return len(list(loader))\ncount()", loader=loader))  # fmt: skip
    assert loader._iterator is not None
    assert on_a_rank(there, tmp_path) == "8"


def test_a_long_chain_of_objects_is_named_by_its_first_one(golden):
    head: list[object] = []
    one = head
    for _ in range(100_000):
        one.append([])
        one = one[0]  # type: ignore[assignment]

    text = "def count():\n    return head\ndef fit():\n    return count()\nfit()"
    golden(refused(cell(text, head=head)))
    text = "def fit(x):\n    return x\nfit(head)"
    golden(refused(cell(text, head=head)))
    while head:  # or Python frees all of them in one another
        head = head[0]  # type: ignore[assignment]


def test_the_shell_is_named():
    shell = _shell()
    try:
        error = refused(
            cell(
                "def train():\n    get_ipython().magic\ntrain()",
                get_ipython=shell.get_ipython,
            )
        )
    finally:
        shell.history_manager.end_session()
    assert "train uses `get_ipython`, IPython itself" in error.message


def test_a_run_is_named():
    Run = type("Run", (), {"__module__": "distmagic.outcome.run"})  # noqa: N806
    assert (
        "`run`, a Run of distmagic"
        in refused(cell("def train():\n    return run\ntrain()", run=Run())).message
    )


def test_culprits_are_found_where_they_hide():
    lock = threading.Lock()
    source = "def train(x=None, *, y=None):\n    return config\ntrain()"
    assert (
        "train uses `config['a'][1]`, a lock"
        in refused(cell(source, config={"a": [0, lock]})).message
    )
    closure = "def timed(f):\n    guard = make()\n    def wrapper():\n        with guard:\n            return f()\n    return wrapper\n@timed\ndef train():\n    pass\ntrain()"
    assert (
        "timed.wrapper uses `guard`, a lock"
        in refused(cell(closure, make=threading.Lock)).message
    )
    default = "def train(x, guard=lock):\n    return x\ntrain(1)"
    assert "train uses `guard`, a lock" in refused(cell(default, lock=lock)).message
    method = "class Trainer:\n    def __init__(self):\n        self.lock = make()\n    def fit(self):\n        pass\ntrainer = Trainer()\ntrainer.fit()"
    assert (
        "The call uses `trainer.lock`, a lock"
        in refused(cell(method, make=threading.Lock)).message
    )
    in_class = "class Trainer:\n    guard = lock\n    def fit(self):\n        return self.guard\nTrainer().fit()"
    assert "Trainer uses `guard`, a lock" in refused(cell(in_class, lock=lock)).message
    inherited = "class Base:\n    def fit(self):\n        return lock\nclass Trainer(Base):\n    pass\nTrainer().fit()"
    assert "Base.fit uses `lock`, a lock" in refused(cell(inherited, lock=lock)).message
    names: dict = {"__name__": "__main__"}
    exec("def train(*a):\n    pass", names)
    assert (
        "train uses `args[1]`, a lock"
        in refused(functools.partial(names["train"], 1, lock)).message
    )


def test_an_unknown_kind_says_what_pickle_said():
    class Odd:
        def __reduce__(self):
            raise RuntimeError("I stay here")

    error = refused(cell("def train():\n    return odd\ntrain()", odd=Odd()))
    assert "RuntimeError: I stay here" in error.message


# ---- sizes


def test_what_is_too_large_is_named_with_its_size_and_the_cure(golden):
    data = {"x": torch.zeros(500_000), "y": [1]}
    thunk = cell(
        "def train():\n    return len(data), small\ntrain()",
        data=data,
        small=torch.zeros(10),
    )
    error = refused(thunk, 1_000_000)
    golden(error)


def test_large_text_and_bytes_are_named_too():
    thunk = cell("def train():\n    return len(text)\ntrain()", text="x" * 3_000_000)
    assert "`text` (3.0 MB, used by train)" in refused(thunk, 1_000_000).message


def test_what_stands_in_the_call_itself_is_used_by_the_call(golden):
    thunk = cell(
        "def train(text):\n    return len(text)\ntrain(text)", text="x" * 3_000_000
    )
    golden(refused(thunk, 1000000))


def test_a_small_view_of_large_data_is_within_the_limit():
    assert packed(
        cell(
            "def train():\n    return part\ntrain()", part=torch.zeros(10_000_000)[:10]
        ),
        100_000,
    )


def test_a_whole_cell_has_the_limit_too(golden):
    with golden.raises(PayloadError):
        pack.pack_whole("x" * 1000, filename=CELL, labels={}, limit_bytes=10)


def test_a_home_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "file"))
    error = refused(cell("def train():\n    pass\ntrain()"))
    assert "can't be written" in error.message
    assert "DISTMAGIC_HOME" in error.hint


# ---- objects that a cell defines


PARSER = """
import argparse
class Pair(argparse.Action):
    def __call__(self, parser, namespace, value, option=None):
        setattr(namespace, self.dest, value.split("="))
class Named(argparse.ArgumentParser):
    def __reduce__(self):
        return Named, (self.prog,)
class Refilled(argparse.ArgumentParser):
    def __getstate__(self):
        return {"name": self.prog}
    def __setstate__(self, state):
        self.__init__(state["name"])
named, refilled = Named("n"), Refilled("r")
parser = argparse.ArgumentParser("fit")
parser.add_argument("--lr", type=float, default=1)
parser.add_argument("--only", default=argparse.SUPPRESS)
parser.add_argument("--inner", help=argparse.SUPPRESS)
parser.add_argument("--pair", action=Pair)
def train():
    found = vars(parser.parse_args(["--lr", "3", "--pair", "a=b"]))
    return found, "--inner" in parser.format_help(), named.prog, refilled.prog
train()"""

STRUCT = """
import struct
HEADER = struct.Struct("<IH")
def train():
    return HEADER.unpack(HEADER.pack(7, 3)), HEADER.size
train()"""

NAMED = """
import collections, enum, typing
kinds = enum.Enum("another_name", ["dog", "cat"])
Point = collections.namedtuple("Another", "x y", defaults=[5])
T = typing.TypeVar("T")
class Box(typing.NamedTuple, typing.Generic[T]):
    value: T
    more: int = 1
def train():
    return kinds.cat.value, Point(1).y, Box[int](3).value, Box(1).more, Box[int].__origin__ is Box
train()"""

CONTEXT_MANAGER = """
import contextlib
seen = []
@contextlib.contextmanager
def noted(name, *, end="end"):
    seen.append(name)
    yield
    seen.append(end)
@noted("fit", end="done")
def fit(x): return x + 1
again = noted("again")
def train():
    with again: return fit(1), fit(2), seen
train()"""

LOCAL_CLASS = """
import threading
class State(threading.local):
    depth = 3
    def __init__(self): self.stack = [1]
state = State()
state.stack.append(2)
def train():
    others = []
    thread = threading.Thread(target=lambda: others.append(state.stack))
    thread.start()
    thread.join()
    return state.stack, state.depth, others
train()"""

LRU = """
import functools
@functools.lru_cache(maxsize=7)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
def train():
    return fib(30), fib.cache_info().maxsize, fib.cache_info().hits
train()"""

CACHED_PROPERTY = """
from functools import cached_property
class Data:
    loads = 0
    @cached_property
    def rows(self):
        self.loads += 1
        return [1, 2]
def train():
    data = Data()
    return data.rows, data.rows, data.loads
train()"""

SINGLEDISPATCH = """
import functools
@functools.singledispatch
def size(value):
    return 0
@size.register
def _(value: list):
    return sum(size(one) for one in value)
@size.register(str)
def of_text(value):
    return len(value)
class Text:
    @functools.singledispatchmethod
    def of(self, value):
        return "any"
    @of.register
    def _(self, value: int):
        return "int"
def train():
    return size(["ab", ["c"], 5]), Text().of(1), Text().of("")
train()"""

NEW_TYPE = """
import typing
UserId = typing.NewType("UserId", int)
def train():
    return UserId(7), UserId.__name__, UserId.__supertype__.__name__, UserId.__module__
train()"""

CONTEXT_VAR = """
import contextvars
import sys
from _pydecimal import _current_context_var as of_a_library
depth = contextvars.ContextVar("depth of it", default=1)
user = contextvars.ContextVar("user")
user.set("here")
nobody = contextvars.ContextVar("nobody")
def scale(x):
    return x * depth.get()
def train():
    before = scale(2)
    depth.set(3)
    theirs = vars(sys.modules["_pydecimal"])["_current_context_var"]
    return before, scale(2), user.get(), nobody.get("none"), of_a_library is theirs
train()"""

LOCAL = """
import threading
kept = threading.local()
kept.rows = [1]
def of_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(hasattr(kept, "rows")))
    thread.start()
    thread.join()
    return seen
def train():
    return kept.rows, of_thread()
train()"""

WRAPPED_ABSTRACT = """
import abc
import functools
class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...
def once(cls):
    @functools.wraps(cls)
    def make(*args):
        return cls(*args)
    return make
@once
class Square(Shape):
    def area(self):
        return 9
def train():
    return Square().area(), isinstance(Square(), Shape), Square.__name__
train()"""

PARAM_SPEC = """
import functools
import typing
P = typing.ParamSpec("P")
R = typing.TypeVar("R")
def twice(f: typing.Callable[P, R]) -> typing.Callable[P, R]:
    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        f(*args, **kwargs)
        return f(*args, **kwargs)
    return run
@twice
def train():
    hints = typing.get_type_hints(twice)
    return P.__name__, hints["f"] == typing.Callable[P, R]
train()"""

REGISTRY = """
class Base:
    known = {}
    def __init_subclass__(cls, *, key):
        Base.known.setdefault(key, []).append(cls)
class Net(Base, key="net"):
    def size(self):
        return 3
def train():
    return Net().size(), Base.known == {"net": [Net]}, Base.__subclasses__() == [Net]
train()"""

SLOTS = """
from dataclasses import dataclass
class Secretive:
    __slots__ = ("__x", "y")
    def __init__(self):
        self.__x = 1
    def x(self):
        return self.__x
@dataclass(slots=True)
class Config:
    lr: float
    name: str = "a"
def train():
    return Secretive().x(), hasattr(Secretive(), "__dict__"), hasattr(Config(1.0), "__dict__"), Config(2.0)
train()"""

MEMBERS = """
import enum
class Planet(enum.Enum):
    EARTH = 5.97, 6.37
    def __init__(self, mass, radius):
        self.mass, self.radius = mass, radius
class Label(enum.Enum):
    def __new__(cls, value, text):
        made = object.__new__(cls)
        made._value_, made.text = value, text
        return made
    A = 1, "first"
    ALSO_A = 1, "second"
class Perm(enum.IntFlag):
    R = 4
    W = 2
    RW = 6
def train():
    return Planet.EARTH.mass, Planet((5.97, 6.37)).radius, Label["ALSO_A"].text, *Perm.__members__
train()"""


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        pytest.param(SLOTS, "(1, False, False, Config(lr=2.0, name='a'))", id="slots"),
        pytest.param(
            MEMBERS, "(5.97, 6.37, 'first', 'R', 'W', 'RW')", id="enum members"
        ),
        pytest.param(REGISTRY, "(3, True, True)", id="__init_subclass__"),
        pytest.param(CONTEXT_VAR, "(2, 6, 'here', 'none', True)", id="ContextVar"),
        pytest.param(LOCAL, "([1], [False])", id="threading.local"),
        pytest.param(WRAPPED_ABSTRACT, "(9, True, 'Square')", id="abstract class"),
        pytest.param(PARAM_SPEC, "('P', True)", id="ParamSpec"),
        pytest.param(PARSER, "({'lr': 3.0, 'inner': None, 'pair': ['a', 'b']}, False, 'n', 'r')", id="parser"),
        pytest.param(STRUCT, "((7, 3), 6)", id="Struct"),
        pytest.param(
            NAMED, "(2, 5, 3, 1, True)", id="under another name, and generic",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="no generic NamedTuple"),
        ),
        pytest.param(CONTEXT_MANAGER, "(2, 3, ['again', 'fit', 'done', 'fit', 'done', 'end'])", id="contextmanager"),
        pytest.param(LOCAL_CLASS, "([1, 2], 3, [[1]])", id="class of threading.local"),
        pytest.param(LRU, "(832040, 7, 28)", id="lru_cache"),
        pytest.param(CACHED_PROPERTY, "([1, 2], [1, 2], 1)", id="cached_property"),
        pytest.param(SINGLEDISPATCH, "(3, 'int', 'any')", id="singledispatch"),
        pytest.param(NEW_TYPE, "(7, 'UserId', 'int', '__main__')", id="NewType"),
    ],
)  # fmt: skip
def test_what_the_standard_library_makes_in_a_cell_travels(source, printed, tmp_path):
    assert on_a_rank(packed(cell(source)), tmp_path) == printed


KERNELS = """
import functools
import inspect
import threading

class Kernel:
    def __init__(self, fn, scale):
        self.fn, self.scale = fn, scale
        self.src = inspect.getsource(fn)
        self.__name__, self.__module__, self.__globals__ = fn.__name__, fn.__module__, fn.__globals__
        self._hash_lock = threading.RLock()

    def __call__(self, x):
        return self.scale * self.fn(x)

class Tuned:
    def __init__(self, fn, configs):
        self.fn, self.configs, self.hook = fn, configs, lambda: 0

    def __call__(self, x):
        return self.fn(x) + len(self.configs)

def jit(scale):
    return functools.partial(Kernel, scale=scale)

def tune(*configs):
    return lambda fn: Tuned(fn, configs)

@jit(3)
def clear(x):
    return x + 1

@tune("a")
@jit(1)
def tuned(x):
    return x
"""
IN_A_CELL = """
import threading
SHIFT = 5
@kernels.jit(2)
def three(x): return x * 3
@kernels.tune("a", "b")
@kernels.jit(10)
def scale(x):
    # a comment
    return three(x) + SHIFT
class Net:
    def __init__(self): self.kernel = scale
    def forward(self, x): return self.kernel(x)
"""


def test_objects_with_a_lock_that_a_decorator_made_travel(beside, tmp_path):
    beside(kernels=KERNELS)
    kernels = importlib.import_module("kernels")
    names = {"kernels": kernels, "clear": kernels.clear, "tuned": kernels.tuned}
    linecache.cache[CELL] = (1, None, IN_A_CELL.splitlines(keepends=True), CELL)
    source = f"""{IN_A_CELL}
def fit(net):
    same = clear is kernels.clear, tuned is kernels.tuned, net.kernel is scale
    return clear(1), tuned(1), scale(2), net.forward(2), same, scale.fn.src.count("comment")
fit(Net())"""
    payload = packed(cell(source, **names))
    expected = "(6, 2, 172, 172, (True, True, True), 1)"
    assert on_a_rank(payload, tmp_path) == expected
    assert [module.name for module in payload.modules] == ["kernels"]


@pytest.mark.parametrize("made", ["jit(2)(plain)", "tune('a')(jit(2)(plain))"])
def test_an_object_with_a_lock_that_is_no_definition_is_named_with_its_function(
    made, beside
):
    beside(kernels=KERNELS)
    kernels = importlib.import_module("kernels")
    names = {"jit": kernels.jit, "tune": kernels.tune}
    source = (
        f"def plain(x): return x\nkernel = {made}\ndef fit(): return kernel(1)\nfit()"
    )
    linecache.cache[CELL] = (1, None, source.splitlines(keepends=True), CELL)
    error = refused(cell(source, **names))
    assert error.message.startswith("fit uses `kernel`, a ")
    assert "of the function plain" in error.message
    assert "lock" not in error.message
    assert error.hint.startswith("Create it inside the function")


COMPILED = """
import torch
@torch.compile(backend="eager")
def step(x): return x + 1
def fit():
    return step(torch.ones(1)).item(), hasattr(step, "_torchdynamo_orig_callable")
fit()"""


@pytest.mark.slow
def test_a_function_that_torch_compile_decorates_travels(tmp_path, compiler_forks):
    linecache.cache[CELL] = (1, None, COMPILED.splitlines(keepends=True), CELL)
    payload = packed(cell(COMPILED))
    assert on_a_rank(payload, tmp_path, forks=compiler_forks) == "(2.0, True)"


WEAK = """
import functools, weakref
def counted(f):
    seen = weakref.ref(f)
    @functools.wraps(f)
    def inner(*a): return seen()(*a)
    inner.f = f
    return inner
@counted
def plus(x): return x + 1
class Data: pass
data = Data()
alive, dead = weakref.ref(data), weakref.ref(Data())
table = weakref.WeakKeyDictionary({data: 1})
data.end = weakref.finalize(data, print, "the notebook's own end")
def fit():
    return plus(2), type(alive()).__name__, dead(), list(table.values()), data.end.alive
fit()"""


def test_weak_references_travel(tmp_path):
    """A finalizer doesn't: that of a TemporaryDirectory would remove a folder which the notebook still uses."""
    expected = "(3, 'Data', None, [1], False)"
    assert on_a_rank(packed(cell(WEAK)), tmp_path) == expected


def test_a_cached_function_that_uses_a_lock_is_looked_into(golden):
    source = "import functools\n@functools.lru_cache\ndef load():\n    return lock\ndef train():\n    return load()\ntrain()"
    golden(refused(cell(source, lock=threading.Lock())))


def test_a_custom_operator_is_named(golden):
    source = (
        "import torch\n@torch.library.custom_op('distmagic_test::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return 2 * x\ndef train():\n    return twice(x)\ntrain()"
    )
    error = refused(cell(source, x=torch.ones(1)))
    golden(error)


def test_an_object_that_is_pickled_by_its_name_is_named(golden):
    class ByName:
        def __init__(self):
            self.__module__, self.__qualname__ = "__main__", "thing"

        def __reduce__(self):
            return self.__qualname__

    error = refused(cell("def train():\n    return thing\ntrain()", thing=ByName()))
    assert error.message.startswith("train uses `thing`, a ")
    golden(error)


@pytest.mark.parametrize("flags", [(), ("-S",)], ids=["with IPython", "without"])
def test_what_displays_in_a_notebook_is_the_ranks_own(flags, tmp_path):
    """A host may have no IPython: `-S` hides all that is installed."""
    from IPython.display import clear_output, display

    source = "def train():\n    clear_output(wait=True)\n    return display.__module__\ntrain()"
    program = packed(cell(source, display=display, clear_output=clear_output))
    assert on_a_rank(program, tmp_path, *flags) == "distmagic.remote.rank.show"


def test_open_exit_and_quit_of_a_notebook_are_pythons_own_on_a_rank(tmp_path):
    names = {name: _shell_names()[name] for name in ("open", "exit", "quit")}
    source = "import builtins\ndef train():\n    return open is builtins.open, exit is builtins.exit, quit is builtins.exit\ntrain()"
    assert on_a_rank(packed(cell(source, **names)), tmp_path) == "(True, True, True)"


def _shell_names() -> dict:
    shell = _shell()
    names = dict(shell.user_ns)
    shell.history_manager.end_session()
    return names


# ---- objects that have the notebook's rank and world size


ALONE = (
    "accelerate.accelerator.Accelerator",
    "transformers.training_args.TrainingArguments",
    "transformers.trainer.Trainer",
    "lightning.pytorch.trainer.trainer.Trainer",
    "pytorch_lightning.trainer.trainer.Trainer",
    "lightning.fabric.fabric.Fabric",
    "torch.distributed.device_mesh.DeviceMesh",
)

INSTALLED = (
    "accelerate.",
    "transformers.",
    "lightning.",
    "pytorch_lightning.",
    "lightning_fabric.",
)


def _of_library(name: str, monkeypatch) -> type:
    """Return a class with the name that the library's has; libraries that are not installed are there for one test."""
    module_name, _, class_name = name.rpartition(".")
    made = type(
        class_name,
        (),
        {
            "__module__": module_name,
            "__init__": lambda self: setattr(self, "world_size", 1),
        },
    )
    for parent in (module_name.partition(".")[0], module_name):
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setattr(sys.modules[module_name], class_name, made, raising=False)
    return made


@pytest.mark.parametrize("name", ALONE)
def test_what_has_the_notebooks_world_size_is_named_before_anything_starts(
    name, monkeypatch, golden
):
    library = _of_library(name, monkeypatch)
    for kind in (library, type("Own", (library,), {"__module__": "__main__"})):
        error = refused(
            cell("def train():\n    return config\ntrain()", config={"a": [kind()]})
        )
        golden(error)


def test_a_sampler_that_has_its_rank_from_the_notebook_is_named(golden):
    sampler = torch.utils.data.distributed.DistributedSampler(
        [1, 2], num_replicas=2, rank=0
    )
    loader = torch.utils.data.DataLoader([1, 2], sampler=sampler)
    error = refused(
        cell("def train():\n    return list(loader)\ntrain()", loader=loader)
    )
    golden(error)


def test_classes_of_these_libraries_travel_by_their_names(monkeypatch):
    library = _of_library("accelerate.accelerator.Accelerator", monkeypatch)
    assert packed(
        cell("def train():\n    return Accelerator()\ntrain()", Accelerator=library)
    )


@pytest.mark.parametrize(
    "name", [name for name in _FRAMEWORKS if name.startswith(INSTALLED)]
)
def test_the_classes_of_these_libraries_have_the_names_that_are_looked_for(name):
    module, _, kind = name.rpartition(".")
    file = folder_of(name.partition(".")[0]) / f"{module.replace('.', '/')}.py"
    assert re.search(rf"^class {kind}\b", file.read_text(), re.MULTILINE)


def test_the_classes_of_this_torch_have_the_names_that_are_looked_for():
    fsdp = importlib.import_module("torch.distributed.fsdp")
    tensor = importlib.import_module("torch.distributed.tensor")
    mesh = importlib.import_module("torch.distributed.device_mesh")
    for kind in (
        torch.nn.parallel.DistributedDataParallel,
        torch.utils.data.distributed.DistributedSampler,
        fsdp.FullyShardedDataParallel,
        fsdp.FSDPModule,
        tensor.DTensor,
        mesh.DeviceMesh,
    ):
        own = type(
            "Own",
            (),
            {"__module__": kind.__module__, "__qualname__": kind.__qualname__},
        )
        own.__name__ = kind.__name__
        with pytest.raises(MadeAlone):
            refuse(own())
