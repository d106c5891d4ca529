"""Values through a parcel: tensors of every kind, memory shared as before, and errors that name the part."""

from __future__ import annotations

import collections
import dataclasses
import errno
import gc
import importlib
import io
import os
import random
import sys
import textwrap
import threading
import types
import warnings
import weakref
from pathlib import Path

import pytest

from distmagic.remote.values import call, parcel, storages
from distmagic.remote.values.seen import Seen
from tests import REPOSITORY
from tests.builders.later import Later
from tests.builders.shell import completed

torch, np = Later("torch"), Later("numpy")


def through(value, tmp_path: Path):
    path = tmp_path / "value"
    size = parcel.dump(value, path)
    assert size == path.stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["value"]
    assert path.stat().st_mode & 0o777 == 0o600
    return parcel.load(path)


def size_of(value) -> int:
    size = parcel.measure(value)
    assert size < 1 << 30
    return size


TENSORS = {
    "float32": lambda: torch.randn(3, 4),
    "bfloat16": lambda: torch.randn(5).to(torch.bfloat16),
    "float8": lambda: torch.randn(5).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(4, dtype=torch.complex128),
    "bool": lambda: torch.tensor([True, False]),
    "0-dim": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "no element but a stride": lambda: torch.empty(4, 0).t(),
    "transposed": lambda: torch.arange(12).reshape(3, 4).t(),
    "expanded": lambda: torch.arange(3).expand(4, 3),
    "one column": lambda: torch.randn(100, 50)[:, 7],
    "every second": lambda: torch.arange(20)[5::2],
    "conj": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "conj, one column": lambda: torch.randn(100, 50, dtype=torch.complex64).conj()[:, 3],
    "neg, one column": lambda: (torch.randn(100, 50, dtype=torch.complex64).conj().imag[:, 3]),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(name, tmp_path):
    tensor = TENSORS[name]()
    back = through(tensor, tmp_path)
    assert type(back) is torch.Tensor
    assert (back.dtype, back.shape, back.is_conj(), back.is_neg()) == (
        tensor.dtype, tensor.shape, tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip
    assert torch.equal(back.to(torch.complex128), tensor.to(torch.complex128))


@pytest.mark.parametrize("make", [lambda t: t.to_sparse(), lambda t: t.to_sparse_csr()])
def test_sparse_tensors_travel(make, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR layout beta
        back = through(make(torch.eye(4)), tmp_path)
        assert torch.equal(back.to_dense(), torch.eye(4))


def test_quantized_meta_and_attributes_travel(tmp_path):
    marked = torch.ones(3)
    marked.origin = "here"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch retires quantized tensors
        quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
        back = through([quantized, torch.empty(3, 4, device="meta"), marked], tmp_path)
        assert torch.equal(back[0].int_repr(), quantized.int_repr())
    assert back[1].device.type == "meta"
    assert back[2].origin == "here"


def test_requires_grad_and_parameters_are_kept(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    back = through(
        {
            "model": model,
            "state": model.state_dict(),
            "leaf": torch.ones(2, requires_grad=True),
        },
        tmp_path,
    )
    assert isinstance(back["model"][0].weight, torch.nn.Parameter)
    assert not back["model"][0].weight.requires_grad
    assert back["model"][0].bias.requires_grad
    assert type(back["state"]) is collections.OrderedDict
    assert back["leaf"].requires_grad
    assert back["leaf"].is_leaf
    assert back["state"]["0.weight"].data_ptr() == back["model"][0].weight.data_ptr()


@pytest.mark.slow
def test_an_optimizer_and_its_state_travel_with_model_and_schedule(tmp_path):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    moved, their_optimizer, theirs = through((model, optimizer, schedule), tmp_path)
    assert their_optimizer.param_groups[0]["params"][0] is moved.weight
    moved(torch.randn(5, 3)).sum().backward()
    their_optimizer.step()
    assert their_optimizer.state[moved.weight]["step"] == 2
    assert theirs.optimizer is their_optimizer
    assert theirs.get_last_lr() == [0.05]


def test_tied_weights_stay_tied(tmp_path):
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    back = through(model, tmp_path)
    assert back[0].weight is back[1].weight


def test_tensors_that_share_memory_share_it_again(tmp_path):
    whole = torch.arange(1000.0)
    back = through([whole, whole[10:20], whole.view(10, 100)[3], whole], tmp_path)
    back[0].fill_(7)
    assert back[1].eq(7).all()
    assert back[2].eq(7).all()
    assert back[3] is back[0]
    assert size_of([whole, whole[10:20], whole.view(10, 100)]) < 4000 + 2000


def test_overlapping_views_share_their_stretch_without_the_rest(tmp_path):
    large = torch.zeros(1_000_000)
    views = [large[1000:1100], large[1050:1200], large[500_000:500_010]]
    assert size_of(views) < 4000
    back = through(views, tmp_path)
    back[0][60] = 5
    assert back[1][10] == 5
    assert back[2].untyped_storage().nbytes() < 200


def test_views_of_different_types_share_their_stretch(tmp_path):
    raw = torch.zeros(10_000, dtype=torch.uint8)
    back = through([raw[17:40], raw[16:24].view(torch.float64)], tmp_path)
    back[1].fill_(1.0)
    assert back[0][6] == 0x3F


@pytest.mark.parametrize(
    "make",
    [lambda t: t[3], lambda t: t[:, 3], lambda t: t[::100, ::10], lambda t: t[3:4, 5]],
)
def test_a_small_view_of_a_large_storage_is_small(make):
    assert size_of(make(torch.zeros(2000, 500))) < 12_000


def test_chunks_that_make_up_a_storage_stay_together(tmp_path):
    parts = torch.arange(1000.0).split(100)
    back = through(parts, tmp_path)
    assert len({part.untyped_storage().data_ptr() for part in back}) == 1


def test_memory_of_another_device_passes_in_chunks(monkeypatch):
    monkeypatch.setattr(storages, "CHUNK_BYTES", 7)
    tensor = torch.arange(100, dtype=torch.uint8)
    chunks = [
        bytes(chunk)
        for chunk in storages._over_the_cpu(tensor.untyped_storage(), 3, 30)
    ]
    assert b"".join(chunks) == bytes(range(3, 30))
    assert max(map(len, chunks)) == 7


def test_tensors_of_a_gpu_come_back_on_the_cpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    model = torch.nn.Linear(3, 3).cuda()
    large = torch.arange(1000.0, device="cuda")
    back, views = through(
        [model, [large[5:10], large[7:12], large.to_sparse()]], tmp_path
    )
    assert torch.equal(back.weight, model.weight.cpu())
    assert {view.device.type for view in views} == {"cpu"}
    views[0][2] = 70
    assert views[1].tolist() == [70, 8, 9, 10, 11]


def test_bare_storages_are_shared_with_tensors(tmp_path):
    tensor = torch.arange(4.0)
    back, storage = through([tensor, tensor.untyped_storage()], tmp_path)
    assert storage.data_ptr() == back.untyped_storage().data_ptr()


def test_numpy_arrays_are_writable_views_of_the_file(tmp_path):
    back = through(
        {
            "a": np.arange(10.0),
            "f": np.asfortranarray(np.ones((3, 4))),
            "s": np.arange(10)[::2],
        },
        tmp_path,
    )
    back["a"][0] = 9
    assert back["a"][0] == 9
    assert back["f"].flags.f_contiguous
    assert back["s"].tolist() == [0, 2, 4, 6, 8]


VIEWS = {
    "a part": lambda a: a[1:],
    "another shape": lambda a: a.reshape(3, 4),
    "transposed": lambda a: a.reshape(3, 4).T,
    "reversed": lambda a: a[::-1],
    "every second": lambda a: a[1::2],
    "one column": lambda a: a.reshape(3, 4)[:, 1],
    "columns backwards": lambda a: a.reshape(3, 4)[:, 2:0:-1],
    "repeated": lambda a: np.broadcast_to(a, (2, 12)),
    "another type": lambda a: a.view("i4")[1::2],
    "a field": lambda a: a.view([("x", "f4"), ("y", "f4")])["y"],
    "a tensor": lambda a: torch.from_numpy(a)[2:],
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("is_first", [False, True])
def test_arrays_that_share_memory_share_it_again(name, is_first, tmp_path):
    a = np.arange(12.0)
    view = VIEWS[name](a)
    pair = [view, a] if is_first else [a, view]
    back = through(pair, tmp_path)
    loaded, array = back if is_first else back[::-1]
    assert (loaded.shape, loaded.dtype, loaded.tolist()) == (
        view.shape, view.dtype, view.tolist(),
    )  # fmt: skip
    a[:] = array[:] = 7.5
    assert loaded.tolist() == view.tolist()
    if name != "a tensor":
        assert loaded.flags.writeable == view.flags.writeable


def test_parts_of_an_array_share_what_overlaps_without_the_rest(tmp_path):
    a = np.arange(1000.0)
    first, second, shown = through([a[10:15], a[12:17], a[100:102]], tmp_path)
    second[:] = 7
    assert first.tolist() == [10, 11, 7, 7, 7]
    assert shown.tolist() == [100, 101]
    assert size_of(a[10:15]) < 1_000


def test_memory_that_is_shared_is_stored_once():
    a = np.zeros(1 << 20)
    assert size_of([a, a[1:], a[::-1], torch.from_numpy(a)]) < a.nbytes + 10_000
    large = np.zeros((1 << 20, 4))
    assert size_of(large[:, 1]) < large.nbytes / 2


def test_a_copy_at_an_unknown_address_overlaps_nothing():
    copied = storages.Window(
        storage=None, start=0, nbytes=1 << 60, packed=torch.zeros(1)
    )
    array = memoryview(np.zeros(4)).cast("B")
    stored, places = storages.joined([copied, array, copied])
    assert stored == [copied, array, copied]
    assert places == [(0, 0), (1, 0), (2, 0)]


def test_a_writable_part_of_an_array_that_was_made_read_only_stays_writable(tmp_path):
    a = np.arange(6)
    part = a[::2]
    a.flags.writeable = False
    back, loaded = through([a, part], tmp_path)
    loaded[0] = 7
    assert (back.flags.writeable, loaded.tolist()) == (False, [7, 2, 4])


@pytest.mark.filterwarnings("error")
def test_broadcast_arrays_are_stored_without_a_warning(tmp_path):
    arrays = np.broadcast_arrays(np.arange(3), np.zeros((2, 1)))
    for one, loaded in zip(arrays, through(arrays, tmp_path), strict=True):
        assert loaded.tolist() == one.tolist()


class Single:
    """Keeps its only object, and has a method that names its `__dict__`."""

    one = None

    def __new__(cls):
        cls.one = cls.one or super().__new__(cls)
        return cls.one

    def update(self, **values):
        self.__dict__.update(values)


def test_the_only_object_of_a_class_stays_the_only_one(tmp_path):
    assert through(Single(), tmp_path) is Single()


def test_an_array_that_is_only_made_to_be_pickled_is_kept_until_then(tmp_path):
    class Made:
        def __reduce__(self):
            made = np.full(100_000, 5.0)
            return list, ([made[::2], made[1:]],)

    gaps, part = through(Made(), tmp_path)
    gaps[1] = 6
    assert part[:4].tolist() == [5, 6, 5, 5]


def test_changes_to_a_loaded_tensor_stay_private(tmp_path):
    path = tmp_path / "value"
    parcel.dump(torch.zeros(100), path)
    parcel.load(path).fill_(1)
    back = parcel.load(path)
    path.unlink()
    assert back.eq(0).all()
    back += 1
    assert back.sum() == 100


def test_a_loaded_tensor_can_be_shared_with_other_processes(tmp_path):
    back = through(torch.arange(10), tmp_path)
    assert back.share_memory_().is_shared()
    assert back.tolist() == list(range(10))


def test_a_type_without_torch_needs_no_torch(tmp_path):
    path = tmp_path / "value"
    parcel.dump({"a": [1, 2.5, "x", None]}, path)
    code = f"import sys; from distmagic.remote.values import parcel; print(parcel.load({str(path)!r}), 'torch' in sys.modules)"
    assert run_python(code) == "{'a': [1, 2.5, 'x', None]} False"


def run_python(code: str, *flags: str) -> str:

    root = str(REPOSITORY)
    code = f"import sys; sys.path.insert(0, {root!r}); {code}"
    done = completed([sys.executable, *flags, "-c", code], check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_a_wrapped_module_comes_back_as_itself(tmp_path):
    import torch.distributed as dist

    inner = torch.nn.Linear(2, 2)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(inner)
        parcel.dump({"model": wrapped}, tmp_path / "value")
    finally:
        dist.destroy_process_group()
    back = parcel.load(tmp_path / "value")["model"]
    assert type(back) is torch.nn.Linear
    assert torch.equal(back.weight, inner.weight)


# ---- functions and classes of __main__


def cell(source: str, **names) -> dict:
    """Run a cell's text in a namespace as a notebook has it."""
    namespace = {"__name__": "__main__", "__builtins__": __builtins__, **names}
    exec(compile(source, "<cell 1>", "exec"), namespace)
    return namespace


def test_class_methods_and_static_methods_of_a_cell_travel(tmp_path):
    names = cell(
        "class Config:\n    @classmethod\n    def named(cls, name):\n        return cls, name\n"
        "    @staticmethod\n    def double(x):\n        return 2 * x"
    )
    parcel.dump(names["Config"], tmp_path / "value")
    loaded = parcel.load(tmp_path / "value", {"__name__": "__main__"})
    assert loaded.named("a") == (loaded, "a")
    assert loaded.double(2) == 4


def test_loaded_functions_share_the_globals_of_the_given_main(tmp_path):
    names = cell(
        "n = 1\ndef bump():\n    global n\n    n += 1\n    return n\ndef peek():\n    return n"
    )
    parcel.dump([names["bump"], names["peek"]], tmp_path / "value")
    main = {"__name__": "__main__"}
    bump, peek = parcel.load(tmp_path / "value", main)
    bump()
    assert peek() == main["n"] == 2
    assert main["bump"] is bump
    assert peek.__globals__ is main


def test_loaded_functions_touch_nobody_elses_globals(tmp_path):
    names = cell("n = 1\ndef peek():\n    return n")
    parcel.dump(names["peek"], tmp_path / "value")
    peek = parcel.load(tmp_path / "value")
    assert peek() == 1
    assert not hasattr(sys.modules["__main__"], "peek")
    assert peek.__globals__["__name__"] == "__main__"


def test_the_class_of_a_captured_value_becomes_a_name_of_main(tmp_path):
    names = cell("class Data:\n    pass\ndata = Data()\ndef train():\n    return data")
    parcel.dump(names["train"], tmp_path / "value")
    main = {"__name__": "__main__"}
    train = parcel.load(tmp_path / "value", main)
    assert main["Data"] is type(train())


def test_a_class_of_the_notebook_comes_back_as_the_same_class(tmp_path):
    names = cell("class Answer:\n    value = 42")
    assert type(through(names["Answer"](), tmp_path)) is names["Answer"]


def test_a_result_leaves_the_notebooks_classes_as_they_are(tmp_path):
    names = cell(
        "n = 1\nclass Net:\n    lr = 0.1\n    def peek(self):\n        return n"
    )
    net = names["Net"]
    peek, net.lr = net.peek, 0.01  # as a rank may set it
    parcel.dump(net(), tmp_path / "value")
    net.lr, names["n"] = 0.5, 2
    back = parcel.load(tmp_path / "value")
    assert (type(back), net.peek, net.lr, back.peek()) == (net, peek, 0.5, 2)


def test_functions_of_a_result_share_their_variables(tmp_path):
    names = cell(
        "def make():\n    n = 0\n    def inc():\n        nonlocal n\n        n += 1\n    return inc, lambda: n\n"
        "pair = make()"
    )
    names["pair"][0]()
    inc, get = through(names["pair"], tmp_path)
    inc()
    assert (get(), names["pair"][1]()) == (2, 1)


def test_a_result_adds_nothing_to_a_registry_of_the_notebook(tmp_path):
    names = cell(
        "found = []\nclass Base:\n    def __init_subclass__(cls):\n        found.append(cls)\n"
        "class Net(Base):\n    pass"
    )
    assert type(through(names["Net"](), tmp_path)) is names["Net"]
    assert names["found"] == [names["Net"]]


def test_a_result_leaves_the_members_of_an_enumeration_as_they_are(tmp_path):
    names = cell(
        "import enum\nclass Kind(enum.Enum):\n    A = 1\n    def __init__(self, n):\n        self.n = n"
    )
    member = names["Kind"].A
    parcel.dump(member, tmp_path / "value")
    member.n = 5
    assert parcel.load(tmp_path / "value") is member
    assert member.n == 5


def test_code_and_modules_are_noted(tmp_path):
    import json
    import string

    names = cell("def train():\n    def inner():\n        import heapq\n    return json.dumps, [Counter()]",
                 json=json, Counter=collections.Counter, unused=string)  # fmt: skip
    seen = Seen()
    parcel.dump(names["train"], tmp_path / "value", seen=seen)
    assert {code.co_name for code in seen.codes} == {"train", "inner"}
    assert {"json", "collections"} <= seen.modules
    assert "string" not in seen.modules


def test_code_keeps_the_name_of_its_file_and_is_noted_once(tmp_path):
    """Lines of a traceback are found by it, and the text of a cell."""
    text = "def make():\n    def inner():\n        return 1\n    return inner\nclass Model:\n    size = lambda self: 2"
    names = {"__name__": "__main__"}
    exec(compile(text, "<cell 7>", "exec"), names)
    seen = Seen()
    value = [names["make"], names["make"](), names["Model"], names["make"]]
    parcel.dump(value, tmp_path / "value", seen=seen)
    make, inner, model, again = parcel.load(tmp_path / "value")
    assert (inner(), model().size()) == (1, 2)
    assert again is make
    codes = [make.__code__, make().__code__, inner.__code__, model.size.__code__]
    assert {code.co_filename for code in codes} == {"<cell 7>"}
    assert sorted(code.co_name for code in seen.codes) == ["<lambda>", "inner", "make"]


def test_submodules_that_stay_behind_are_not_asked_for(tmp_path):
    import distmagic
    import distmagic.state.model

    names = cell(
        "def train(x):\n    return distmagic.report, x.state", distmagic=distmagic
    )
    parcel.dump(names["train"], tmp_path / "value")
    assert b"distmagic.state.model" not in (tmp_path / "value").read_bytes()
    assert distmagic.state


@pytest.mark.slow
def test_every_loaded_module_goes_by_its_name(tmp_path):
    import lightning
    import sklearn.linear_model
    import torch._dynamo
    import transformers

    assert all((lightning, sklearn, transformers, torch.ops.aten.mul))
    loaded = {
        key: module
        for key, module in sys.modules.items()
        if isinstance(module, types.ModuleType) and not key.startswith("distmagic.")
    }
    own_class = {key for key in loaded if type(loaded[key]) is not types.ModuleType}
    assert own_class >= {"torch.backends.cudnn", "torch.ops", "transformers"}
    back = through(loaded, tmp_path)
    assert [key for key in loaded if back[key] is not loaded[key]] == []


@pytest.mark.parametrize(
    "body",
    [
        "torch.backends.cudnn.deterministic, torch.backends.cuda.matmul.allow_tf32",
        "torch._dynamo.config.suppress_errors",
        "torch.ops.aten.mul.Tensor, aten.add",
        "torch.ones(1), x.classes, x.ops",
        "dist.is_available(), x.config",
    ],
)
def test_a_function_whose_attributes_are_called_as_a_submodule_travels(body, tmp_path):
    import torch._dynamo
    import torch.distributed.config

    aten, dist = torch.ops.aten, torch.distributed
    x = types.SimpleNamespace(classes=1, ops=2, config=3)
    names = cell(
        f"def train():\n    return {body}",
        torch=sys.modules["torch"], aten=aten, dist=dist, x=x,
    )  # fmt: skip
    back = through(names["train"], tmp_path)
    assert str(back()) == str(names["train"]())
    assert through(aten, tmp_path) is aten


def test_modules_of_a_class_of_their_own_go_by_their_names(tmp_path, monkeypatch):
    class Settings(types.ModuleType):
        """As six.moves and configuration modules are: an attribute is made when it is asked for."""

        def __getattr__(self, name):
            if name != "inner":
                raise AttributeError(name)
            self.inner = Settings(f"{self.__name__}.inner")
            return self.inner

    settings = Settings("test_settings")
    monkeypatch.setitem(sys.modules, "test_settings", settings)
    inner = settings.inner.inner
    assert through([settings, inner], tmp_path) == [settings, inner]
    # An alias in sys.modules; a module whose own name is that of another one.
    monkeypatch.setitem(sys.modules, "test_alias", alias := Settings("json"))
    seen = Seen()
    parcel.dump(alias, tmp_path / "value", seen=seen)
    assert parcel.load(tmp_path / "value") is alias
    assert "test_alias" in seen.modules
    assert "json" not in seen.modules


def test_the_standard_streams_are_those_of_the_other_end(tmp_path, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    parcel.dump(out, tmp_path / "value")
    monkeypatch.undo()
    assert parcel.load(tmp_path / "value") is sys.stdout


# ---- errors


@pytest.mark.parametrize(
    "find",
    [
        lambda: os.environ,
        lambda: random.randint.__self__,
        lambda: np.random.rand.__self__,
        lambda: torch.default_generator,
        lambda: dataclasses.MISSING,
        lambda: dataclasses.KW_ONLY,
    ],
)
def test_what_each_process_has_one_of_is_that_of_the_other_end(find, tmp_path):
    assert through(find(), tmp_path) is find()


@pytest.mark.parametrize(
    ("value", "module"),
    [
        (np.random.rand, "numpy.random.mtrand"),
        (random.randint, "random"),
        (torch.default_generator, "torch"),
    ],
)
def test_what_each_process_has_one_of_needs_its_module(value, module, tmp_path):
    seen = Seen()
    parcel.dump([value], tmp_path / "value", seen=seen)
    assert module in seen.modules


@pytest.mark.parametrize("name", [None, 5])
def test_a_function_may_be_of_globals_without_a_names_text(name, tmp_path):
    names = {"__name__": name}
    exec("def one():\n    return 1", names)
    assert through(names["one"], tmp_path)() == 1


def test_an_object_that_an_installed_package_keeps_goes_by_name(
    tmp_path, monkeypatch, golden
):
    """As mpmath's `mp`: functions of the package use that one, and it can't be loaded as a copy."""
    package = tmp_path / "site-packages" / "exact"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from exact.contexts import Context\nmp = Context()")  # fmt: skip
    (package / "contexts.py").write_text(
        "import threading\nclass Context:\n    def __init__(self): self.lock = threading.Lock()\n_hidden = Context()"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    exact = importlib.import_module("exact")
    seen = Seen()
    parcel.dump([exact.mp], tmp_path / "value", seen=seen)
    assert "exact" in seen.modules
    assert parcel.load(tmp_path / "value")[0] is exact.mp
    for other in (exact.Context(), exact.contexts._hidden):
        with golden.raises(parcel.ParcelError):
            parcel.dump(other, tmp_path / "value")
    monkeypatch.delitem(sys.modules, "exact.contexts")
    monkeypatch.delitem(sys.modules, "exact")


def test_the_notebooks_environment_stays_there(tmp_path, monkeypatch):
    monkeypatch.setenv("DB_PASSWORD", "s3cret-words")
    names = cell("def train():\n    return env['RANK']", env=os.environ)
    parcel.dump(names["train"], tmp_path / "value", namespace=names)
    assert b"s3cret-words" not in (tmp_path / "value").read_bytes()


def test_a_part_that_cannot_be_pickled_is_named(tmp_path, golden):
    model = torch.nn.Linear(2, 2)
    model.lock = threading.Lock()
    with golden.raises(parcel.ParcelError):
        parcel.dump({"loss": 1.0, "model": [model]}, tmp_path / "value")
    assert list(tmp_path.iterdir()) == []


def test_parts_of_modules_read_as_in_the_users_code(tmp_path, golden):
    model = torch.nn.Sequential(collections.OrderedDict(first=torch.nn.Linear(2, 2)))
    model.first.stream = (i for i in range(3))
    with golden.raises(parcel.ParcelError):
        parcel.dump(model, tmp_path / "value")


def test_a_cycle_with_a_lock_is_taken_apart_once(tmp_path, golden):
    box: dict = {"lock": [threading.RLock()]}
    box["self"] = box
    with golden.raises(parcel.ParcelError):
        parcel.dump(box, tmp_path / "value")


def test_an_object_that_refuses_is_the_culprit(tmp_path, golden):
    class Stubborn:
        def __reduce__(self):
            raise RuntimeError("no")

    with golden.raises(parcel.ParcelError):
        parcel.dump([1, Stubborn()], tmp_path / "value")


def test_a_part_among_very_many_is_told_by_what_pickle_said(tmp_path, golden):
    with golden.raises(parcel.ParcelError):
        parcel.dump(
            [*({} for _ in range(10_000)), threading.Lock()], tmp_path / "value"
        )


def test_a_limit_is_kept_before_any_buffer_is_written(tmp_path):
    with pytest.raises(parcel.TooLarge) as caught:
        parcel.dump(torch.zeros(1000), tmp_path / "value", limit_bytes=3000)
    assert 4000 <= caught.value.size_bytes < 8000
    with pytest.raises(parcel.TooLarge):
        parcel.dump("x" * 10_000, tmp_path / "value", limit_bytes=3000)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_gets_full_is_an_os_error(monkeypatch):
    class Full(io.BytesIO):
        def write(self, data):
            if self.tell():
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(parcel, "atomic_write", lambda _: Full())
    with pytest.raises(OSError, match="No space left"):
        parcel.dump("x" * 100_000, "anywhere")


@pytest.mark.parametrize("kept", [0, 10, 64, 200, -40, -1])
def test_a_file_that_was_cut_off_is_refused(kept, tmp_path, golden):
    path = tmp_path / "value"
    parcel.dump([torch.randn(100), "text"], path)
    path.write_bytes(path.read_bytes()[:kept])
    with golden.raises(parcel.ParcelError):
        parcel.load(path)


def test_garbage_is_refused(tmp_path, golden):
    path = tmp_path / "value"
    path.write_bytes(b"garbage" * 100)
    with golden.raises(parcel.ParcelError):
        parcel.load(path)
    parcel.dump(torch.zeros(10), path)
    whole = path.read_bytes()
    for old, new in (
        (b'"windows":[[', b'"windows":[[9'),
        (b'"rows":[[0', b'"rows":[[7'),
        (whole[64:80], b"\0" * 16),
    ):
        broken = whole.replace(old, new, 1)
        table = broken.index(b'{"buffers"')
        length = len(broken) - parcel._TRAILER.size - table
        path.write_bytes(
            broken[: table + length] + parcel._TRAILER.pack(table, length, parcel._END)
        )
        with golden.raises(parcel.ParcelError):
            parcel.load(path)


def test_a_value_whose_module_is_missing_here_is_explained(tmp_path, monkeypatch):
    module = types.ModuleType("only_there")
    exec("class Thing:\n    pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_there", module)
    parcel.dump(module.Thing(), tmp_path / "value")
    monkeypatch.undo()
    with pytest.raises(parcel.ParcelError) as caught:
        parcel.load(tmp_path / "value")
    assert "needs the module 'only_there'" in caught.value.message
    assert "Install only_there" in caught.value.hint


# ---- a payload's call


def rank(what, tmp_path: Path):
    """Do what a rank does with a payload."""
    parcel.dump(what, tmp_path / "value")
    main = types.ModuleType("__main__")
    return call.perform(call.load(tmp_path / "value", main), main), main


def test_a_call_is_called_in_main(tmp_path):
    names = cell(
        "rate = 2\ndef train(n):\n    return n * rate\ndef thunk():\n    return train(21)"
    )
    value, main = rank(call.Call(names["thunk"]), tmp_path)
    assert value == 42
    assert main.rate == 2
    assert main.train.__globals__ is main.__dict__


def test_a_coroutine_is_run(tmp_path):
    names = cell(
        "import asyncio\nasync def train():\n    await asyncio.sleep(0)\n    return 42"
    )
    assert rank(call.Call(names["train"]), tmp_path)[0] == 42


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("x = 20\ndef f():\n    return x + 1\nf() * 2", 42),
        ("import asyncio\nawait asyncio.sleep(0)\n42", 42),
        ("async def f():\n    return 42\nawait f()", 42),
        ("async def f():\n    return 42\nf()", 42),
        ("result = 42", 42),
        ("for i in range(3):\n    pass", None),
        ("if __name__ == '__main__':\n    done = 1", None),
        ("", None),
    ],
)
def test_a_whole_cell_gives_its_last_expression(source, value, tmp_path):
    found, main = rank(call.Whole(source, "<cell 7>"), tmp_path)
    assert found == value
    assert not hasattr(main, "__distmagic_result__")


def test_a_whole_cell_keeps_its_lines_and_its_name(tmp_path):
    with pytest.raises(ZeroDivisionError) as caught:
        rank(
            call.Whole(
                "# the magic's line\n\ndef f():\n    return 1 / 0\nf()", "<cell 7>"
            ),
            tmp_path,
        )
    frames = [
        (entry.path if isinstance(entry.path, str) else str(entry.path), entry.lineno)
        for entry in caught.traceback
    ]
    assert [(str(path).rsplit("/", 1)[-1], line + 1) for path, line in frames[-2:]] == [
        ("<cell 7>", 5),
        ("<cell 7>", 4),
    ]


def test_what_is_no_payload_is_refused(tmp_path, golden):
    parcel.dump(42, tmp_path / "value")
    with golden.raises(parcel.ParcelError):
        call.load(tmp_path / "value", types.ModuleType("__main__"))


@pytest.mark.parametrize("pack", [parcel.dump, lambda value, _: parcel.measure(value)])
def test_a_value_that_was_packed_is_not_kept(pack, tmp_path):
    class Value:
        def __reduce__(self):
            return int, ()

    gc.disable()  # only counts of references free it
    try:
        value = Value()
        gone = weakref.ref(value)
        pack([value], tmp_path / "value")
        del value
        assert gone() is None
    finally:
        gc.enable()


def test_a_module_that_its_user_has_registered_goes_by_value(tmp_path, monkeypatch):
    import cloudpickle

    module = types.ModuleType("registered")
    exec("scale = 3\ndef scaled(x): return scale * x", vars(module))
    monkeypatch.setitem(sys.modules, "registered", module)
    cloudpickle.register_pickle_by_value(module)
    try:
        parcel.dump([module, module.scaled], tmp_path / "value")
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    monkeypatch.delitem(sys.modules, "registered")
    back, scaled = parcel.load(tmp_path / "value")
    assert (back.scaled(2), scaled(2)) == (6, 6)
    assert back is not module


def test_what_is_loaded_goes_with_its_name(tmp_path):
    gc.disable()  # only counts of references free it
    try:
        loaded = through([torch.ones(3)], tmp_path)
        tensor = weakref.ref(loaded[0])
        del loaded
        assert tensor() is None
    finally:
        gc.enable()


def test_objects_as_keys_are_hashed_when_they_arrive_and_not_in_each_cell(tmp_path):
    main = types.ModuleType("__main__")
    text = """
        hashed = []
        class Key:
            def __hash__(self):
                hashed.append(1)
                return 1
        key = Key()
        table = {key: 1}
    """
    exec(textwrap.dedent(text), vars(main))
    parcel.dump(main.key, tmp_path / "key")
    before = len(main.hashed)
    parcel.load(tmp_path / "key", vars(main))
    assert len(main.hashed) == before
    assert main.table[main.key] == 1
