"""Pickles and unpickles objects for a parcel.

It uses cloudpickle, with these exceptions:

- tensors and storages become numbers in a table, and their memory is stored after the pickle (see storages.py);
- functions of `__main__` get the globals of the loading `__main__`, and the names that it defines are included in a
  table;
- a DistributedDataParallel module becomes the module in it, and a DataLoader loses its worker processes;
- objects that a cell defines and that pickle only refers to by name are rebuilt, and an object with a lock that a
  decorator made is pickled by name, or as source (see cell_objects.py);
- functions that share a variable of a function around them still share it;
- classes keep all their attributes, and a loaded result leaves the notebook's own unchanged (see classes.py);
- weak references keep alive what they refer to;
- tensors of a call keep their hooks, and optimizers their hooks and attributes;
- small values that no code uses are included in the table, pickled one by one (see by_name.py);
- for another minor version of Python, code becomes source (see source_form.py); all other code keeps its file name,
  by which tracebacks and `inspect` find its lines;
- the code and the modules that the pickle refers to are recorded.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import hashlib
import importlib
import inspect
import pickle
import pkgutil
import sys
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distmagic.remote.values import by_name, cell_objects, classes
from distmagic.remote.values.source_form import SourceForm
from distmagic.remote.values.storages import Storages, TensorLoader, TensorRow, Window
from distmagic.remote.wire.parts import Blob


@dataclass
class Seen:
    """Notes about a parcel: the code in it, the modules that it needs when loaded, its SHA-256, its side files.

    `annotated` are names in string annotations. `only` is a request: functions go with these globals (None: with all).
    """

    codes: list[types.CodeType] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    annotated: set[str] = field(default_factory=set)
    sha256: Any = field(default_factory=hashlib.sha256)
    side_files: list[Blob] = field(default_factory=list)
    only: Container[str] | None = None


# Raises for an object that must not be sent although it could be pickled.
Refuse = Callable[[object], None]


class Packer:
    """Pickles one value for a parcel, and holds its buffers until they are written. With `source`, code is pickled as
    source.

    `is_aside`: the value is only included for lookups by name, so objects that only a function's globals refer to are
    left out.
    """

    def __init__(
        self,
        sink: Any,
        seen: Seen,
        refuse: Refuse | None,
        source: SourceForm | None = None,
        *,
        is_aside: bool = False,
    ) -> None:
        self._storages = Storages()
        self._buffers: list[memoryview] = []
        self._seen = seen
        self._refuse = refuse
        self.source = source
        self.is_aside = is_aside
        self._definitions: dict[str, object] = {}
        self._pickler = _pickler_class()(
            sink, self, lambda buffer: self._buffers.append(buffer.raw())
        )

    def pickle(
        self, value: object, namespace: Mapping[str, object] | None = None
    ) -> None:
        """Pickle the value, followed by the table of all definitions of `__main__` that it uses. Call only once.

        With the notebook's `namespace`, also the values that a rank may look up by name.
        """
        try:
            self._pickler.dump(value)
            asides = {} if namespace is None else self._asides(namespace)
            self._pickler.dump(asides | self._definitions)
        finally:
            del self._pickler  # it refers to this packer: a reference cycle would keep both, and the value, alive

    def _asides(self, namespace: Mapping[str, object]) -> dict[str, object]:
        """Return the values for lookups by name, without those that the value uses anyway."""
        room = by_name.MAX_ALL_BYTES
        found: dict[str, tuple[bytes, Seen]] = {}
        for name, value in reversed(list(namespace.items())):
            # Pickling runs arbitrary code. A value that fails is only missing if it is looked up.
            with contextlib.suppress(Exception):
                if name in self._definitions or not by_name.is_offered(name, value):
                    continue
                sink, seen = by_name.Small(), Seen()
                packer = Packer(sink, seen, self._refuse, self.source, is_aside=True)
                packer.pickle(value)
                room -= sink.tell()
                if room >= 0 and not any(packer.plan()):
                    found[name] = sink.getvalue(), seen
        annotated: set[str] = set()
        while waiting := self._seen.annotated & found.keys() - annotated:
            annotated |= waiting
            for _, seen in map(found.__getitem__, waiting):
                self._seen.codes += seen.codes
                self._seen.modules |= seen.modules
                self._seen.annotated |= seen.annotated
        named = by_name.in_strings(self._seen.codes)
        here = by_name.packages(self._seen.modules, self._seen.codes)
        asides: dict[str, object] = {}
        for name, value in namespace.items():  # `__subclasses__()` keeps their order
            if name in found:
                pickled, seen = found[name]
                is_at_once = (
                    by_name.packages(seen.modules) <= here
                    or name in annotated
                    or (name in named and not isinstance(value, types.ModuleType))
                )
                asides[name] = by_name.Aside(pickled, is_at_once)
        return asides

    def plan(self) -> tuple[list[memoryview], list[Window], list[TensorRow]]:
        """Return the data stored after the pickle: buffers in order, the windows of storages, and their table."""
        return self._buffers, *self._storages.plan()

    def reduce(self, obj: Any) -> Any:
        """Return how to pickle `obj`, as `__reduce__` does; NotImplemented leaves it to cloudpickle.

        Also records notes.
        """
        if type(obj) in _WEAK:
            return _reduced_weak(obj)
        of_a_cell = cell_objects.reduced(obj)
        if of_a_cell is not NotImplemented:
            self._note_global(obj)
            return of_a_cell
        if self._refuse is not None:
            self._refuse(obj)
        if isinstance(obj, types.CodeType):
            return self._reduce_code(obj)
        if isinstance(obj, types.ModuleType):
            return self._reduce_module(obj)
        function = cell_objects.function_in(obj)
        if function is not None:
            self._seen.codes.append(function.__code__)
            self._note_global(function)
            made = cell_objects.reduced_decorated(obj, function, _MAIN)
            if made is not NotImplemented:
                return made
        if isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType)):
            self._note_global(obj)
        elif obj is _MAIN:
            return _main, ()
        else:
            return self._reduce_object(obj)
        return NotImplemented

    def _reduce_object(self, obj: Any) -> Any:
        reduced = self._reduce_torch(obj) if "torch" in sys.modules else NotImplemented
        if reduced is NotImplemented:
            reduced = cell_objects.reduced_kept(obj)
        if reduced is not NotImplemented or type(obj) in copyreg.dispatch_table:
            return reduced
        if isinstance(obj, Exception):
            return _reduced_exception(obj)
        reduced = cell_objects.reduced_instance(obj)
        if reduced is not NotImplemented:
            return reduced
        if isinstance(getattr(type(obj), "__getattr__", None), types.FunctionType):
            # Set the state of an object whose class has a `__getattr__` without looking up `__setstate__`. On an empty
            # object, `self.values[name]` in a `__getattr__` would recurse forever.
            kind: Any = type(obj)
            own = kind.__reduce__, kind.__reduce_ex__
            if own != (object.__reduce__, object.__reduce_ex__):
                return NotImplemented
            if getattr(kind, "__setstate__", None) is not None:
                return NotImplemented
            make, args, state, items, pairs = (*obj.__reduce_ex__(5), None, None, None)[
                :5
            ]
            if state is None:
                return NotImplemented
            return make, args, state, items, pairs, _set_state
        return NotImplemented

    def _reduce_module(self, module: types.ModuleType) -> Any:
        """Pickle a module by its import name, even one of a special class (`torch.backends`)."""
        name = module.__name__
        if sys.modules.get(name) is not module:
            for key, loaded in sys.modules.copy().items():
                if loaded is module:
                    name = key
        self._seen.modules.add(name)
        # A part of distmagic that hosts lack: cloudpickle adds any loaded submodule whose name a function mentions
        # (`x.state` and distmagic.state).
        is_remote = f"{name}.".startswith(_REMOTE)
        if name.startswith("distmagic.") and not is_remote:
            return __import__, ("distmagic",)
        if any(f"{name}.".startswith(f"{one}.") for one in _by_value()):
            kept = {k: v for k, v in vars(module).items() if k not in _OF_AN_IMPORT}
            return _module_by_value, (name,), kept
        if name in sys.modules:
            return importlib.import_module, (name,)
        while name and name not in sys.modules:
            name = name.rpartition(".")[0]
        # `torch.ops.aten` is only an attribute
        return _by_path(module, f"{name}:{module.__name__[len(name) + 1 :]}")

    def _reduce_code(self, code: types.CodeType) -> Any:
        """Pickle code with its file name. cloudpickle 3.1.3 gives all code the same name."""
        if code.co_filename == _NAMELESS:
            return NotImplemented
        self._seen.codes.append(code)
        if self.source is not None:
            return NotImplemented
        return code_of_file, (code.replace(co_filename=_NAMELESS), code.co_filename)

    def reduced_function(self, function: types.FunctionType, plain: Any) -> Any:
        """Return how to pickle a function, with more submodules and perhaps fewer globals than cloudpickle does."""
        _add_submodules(function.__code__, plain[2][1])
        is_of_main = function.__globals__.get("__name__") == "__main__"
        if self._seen.only is not None and is_of_main:
            return by_name.with_globals(plain, self._seen.only)
        return by_name.without_objects(plain) if self.is_aside else plain

    def _note_global(self, obj: Any) -> None:
        module, name = (
            getattr(obj, "__module__", None),
            getattr(obj, "__qualname__", ""),
        )
        if isinstance(module, str):
            self._seen.modules.add(module)
        if module == "__main__" and callable(obj):
            annotations = inspect.get_annotations(obj).values()
            self._seen.annotated |= by_name.in_annotations(annotations)
        if module == "__main__" and name.isidentifier():
            current = sys.modules["__main__"].__dict__.get(name)
            if name not in self._definitions or current is obj:
                self._definitions[name] = obj
        if (
            isinstance(obj, types.FunctionType)
            and obj.__globals__.get("__name__") == "__main__"
        ):
            self._pickler.globals_ref.setdefault(id(obj.__globals__), _MAIN)

    def _reduce_torch(self, obj: Any) -> Any:
        torch = sys.modules["torch"]
        if isinstance(obj, torch.Tensor):
            number = self._storages.add_tensor(obj)
            plain = NotImplemented if number is None else (_tensor, (number,))
            return self._with_hooks(obj, plain)
        optimizers = sys.modules.get("torch.optim.optimizer")
        if optimizers is not None and isinstance(obj, optimizers.Optimizer):
            return self._reduce_optimizer(obj, optimizers.Optimizer)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
            return _storage, (self._storages.add_storage(obj),)
        if isinstance(obj, torch.storage.TypedStorage):
            storage = obj._untyped_storage  # noqa: SLF001 - the public way warns
            if storage.device.type != "meta":
                return _typed_storage, (
                    self._storages.add_storage(storage),
                    str(obj.dtype).removeprefix("torch."),
                )
        return _reduced_of_torch(obj, torch)

    def _with_hooks(self, tensor: Any, plain: Any) -> Any:
        """Add a tensor's hooks, which torch leaves out. A result has none: they may belong to its rank."""
        torch = sys.modules["torch"]
        if self._refuse is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter):  # fmt: skip
            return plain
        hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # noqa: SLF001
        if not any(hooks) or not _can_be_pickled(hooks):
            return plain
        make, args, *_ = tensor.__reduce_ex__(5) if plain is NotImplemented else plain
        return make, args, hooks, None, None, _set_hooks

    def _reduce_optimizer(self, optimizer: Any, base: Any) -> Any:
        """Add attributes and hooks, which torch leaves out. A result has none: they may belong to its rank."""
        kind: Any = type(optimizer)
        if self._refuse is None or kind.__getstate__ is not base.__getstate__:
            return NotImplemented
        make, args, state, *_ = optimizer.__reduce_ex__(5)
        more = vars(optimizer).copy()
        more.pop("step", None)  # in it, a scheduler notes that it was called
        for name in [one for one in more if "hook" in one]:
            if not _can_be_pickled(more[name]):
                del more[name]  # torch sets it anew
        return make, args, state | more


def _by_path(obj: object, path: str) -> Any:
    """Return how to pickle an object that `pkgutil.resolve_name` finds; NotImplemented for any other one."""
    with contextlib.suppress(AttributeError, ValueError):
        if pkgutil.resolve_name(path) is obj:
            return pkgutil.resolve_name, (path,)
    return NotImplemented


_WEAK = (weakref.ref, weakref.WeakMethod, *weakref.ProxyTypes)


def _reduced_weak(obj: Any) -> Any:
    if type(obj) in weakref.ProxyTypes:
        try:
            return _weak, (obj.__repr__.__self__, weakref.proxy)
        except ReferenceError:
            return _weak, (None, weakref.proxy)
    referent = obj()
    return _weak, (referent, weakref.ref if referent is None else type(obj))


def _reduced_of_torch(obj: Any, torch: Any) -> Any:
    if type(obj) in (torch.finfo, torch.iinfo):
        return type(obj), (getattr(torch, obj.dtype),)
    if type(obj).__module__ == "torch._ops":
        return _by_path(obj, f"torch:ops.{obj}")
    data = sys.modules.get("torch.utils.data.dataloader")
    if data is not None and isinstance(obj, data.DataLoader):
        return _without_workers(obj)
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    if ddp is not None and isinstance(obj, ddp.DistributedDataParallel):
        return _same, (obj.module,)
    parametrize: Any = sys.modules.get("torch.nn.utils.parametrize")
    is_module = parametrize is not None and isinstance(obj, torch.nn.Module)
    if is_module and parametrize.is_parametrized(obj):
        # torch refuses, because its class is made for this object alone.
        kind = parametrize.type_before_parametrizations(obj)
        state = vars(obj) | {"_compiled_call_impl": None}
        return object.__new__, (kind,), state, None, None, _parametrized
    return NotImplemented


def _without_workers(loader: Any) -> Any:
    """Leave out the iterator with the worker processes that a DataLoader with `persistent_workers` keeps."""
    if vars(loader).get("_iterator") is None:
        return NotImplemented
    make, args, state, *rest = loader.__reduce_ex__(5)
    if isinstance(state, dict):
        state = state | {"_iterator": None}
    return make, args, state, *rest


def _reduced_exception(error: Exception) -> Any:
    """Rebuild an exception without calling its own `__init__`, whose arguments often differ from `args`."""
    kind: Any = type(error)
    builtin = next(one for one in kind.__mro__ if one.__module__ == "builtins")
    is_plain = builtin.__basicsize__ == Exception.__basicsize__
    has_own_init = isinstance(kind.__init__, types.FunctionType)
    has_own_new = isinstance(kind.__new__, types.FunctionType)
    own = kind.__reduce__, kind.__reduce_ex__
    has_own_reduction = own != (Exception.__reduce__, Exception.__reduce_ex__)
    if not is_plain or not has_own_init or has_own_new or has_own_reduction:
        return NotImplemented
    return copyreg.__newobj__, (kind, *error.args), vars(error)  # type: ignore[attr-defined]


def _can_be_pickled(value: object) -> bool:
    """Whether cloudpickle can pickle it: hooks that can't, such as those of a tracker, stay where they are."""
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - whatever a user's object raises
        return False
    return True


def _set_hooks(tensor: Any, hooks: Any) -> None:
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks  # noqa: SLF001


def _parametrized(module: Any, state: Any) -> None:
    parametrize: Any = importlib.import_module("torch.nn.utils.parametrize")
    vars(module).update(state)
    parametrize._inject_new_class(module)  # noqa: SLF001
    for name in module.parametrizations:
        parametrize._inject_property(module, name)  # noqa: SLF001


def _set_state(obj: Any, state: Any) -> None:
    """Set an object's attributes, as pickle does for a class without `__setstate__`."""
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        obj.__dict__.update(attributes)
    for name, value in (slots or {}).items():
        setattr(obj, name, value)


_REMOTE = "distmagic.remote."
_OF_AN_IMPORT = ("__builtins__", "__loader__", "__spec__", "__cached__")


def _by_value() -> set[str]:
    import cloudpickle

    return cloudpickle.list_registry_pickle_by_value()  # type: ignore[no-any-return]


@contextlib.contextmanager
def going_by_value(modules: Iterable[str]) -> Iterator[None]:
    """Inside the block, pickle these modules and their definitions by value, not by name."""
    import cloudpickle

    new = set(modules) - _by_value()
    for name in new:
        cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        yield
    finally:
        for name in new:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])


@functools.cache
def _pickler_class() -> Any:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """cloudpickle's pickler, which first asks a `Packer` how to pickle an object."""

        def __init__(
            self, sink: Any, packer: Packer, keep: Callable[[pickle.PickleBuffer], None]
        ) -> None:
            super().__init__(sink, protocol=5, buffer_callback=keep)
            self._packer = packer
            # {id of a function's cell: the cell, and the empty one from which it is made when it is loaded}
            self._cells: dict[int, tuple[types.CellType, types.CellType]] = {}

        def reducer_override(self, obj: Any) -> Any:
            reduced = self._packer.reduce(obj)
            if reduced is not NotImplemented:
                return reduced
            plain = super().reducer_override(obj)
            if type(obj) is types.FunctionType and plain is not NotImplemented:
                plain = self._with_shared_cells(obj, plain)
                plain = self._packer.reduced_function(obj, plain)
            is_by_value = isinstance(obj, type) and plain is not NotImplemented
            if is_by_value:
                classes.add_left_out(obj, plain)
            source = self._packer.source
            if source is not None:
                plain = source.reduced(obj, plain)
            return classes.whole(obj, plain) if is_by_value else plain

        def _with_shared_cells(self, function: types.FunctionType, plain: Any) -> Any:
            """Make functions that share a variable share it again. cloudpickle gives each function cells of its own."""
            make, (*args, closure), *rest = plain
            if closure is None:
                return plain
            closure = tuple(
                self._cells.setdefault(id(cell), (cell, types.CellType()))[1]
                for cell in function.__closure__ or ()
            )
            return make, (*args, closure), *rest

    return Pickler


def _add_submodules(code: types.CodeType, slots: dict[str, Any]) -> None:
    """Add the submodules that functions, lambdas and comprehensions in a function name (`xml.dom.minidom`)."""
    import cloudpickle.cloudpickle as ways

    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            known = slots["__globals__"].values()
            found = ways._find_imported_submodules(one, known)  # noqa: SLF001
            slots["_cloudpickle_submodules"] += found
            _add_submodules(one, slots)


# Called by the pickle to build objects. `Loader.find_class` replaces them by its own.

_ONLY = "a parcel is opened by parcel.load only"
_NAMELESS = "<the name of its file follows>"


def code_of_file(code: types.CodeType, filename: str) -> types.CodeType:
    """Return code with this file name."""
    return code.replace(co_filename=filename)


def _module_by_value(name: str) -> types.ModuleType:
    return sys.modules.setdefault(name, types.ModuleType(name))


def _tensor(*_: object) -> Any:
    raise pickle.UnpicklingError(_ONLY)


def _storage(*_: object) -> Any:
    raise pickle.UnpicklingError(_ONLY)


def _typed_storage(*_: object) -> Any:
    raise pickle.UnpicklingError(_ONLY)


def _main() -> dict[str, Any]:
    raise pickle.UnpicklingError(_ONLY)


def _weak(*_: object) -> Any:
    raise pickle.UnpicklingError(_ONLY)


def _same(value: object) -> object:
    return value


class _Main(dict[str, Any]):
    """Stands for the globals of `__main__` in a pickle."""


_MAIN = _Main(__name__="__main__")  # not empty: cloudpickle would fill an empty one


class Loader(pickle.Unpickler):
    """An unpickler with the names above bound to one parcel's memory and one namespace.

    The classes `kept` stay as they are: a result's copy of a class has other globals and a rank's values.
    """

    def __init__(
        self,
        file: Any,
        buffers: Any,
        tensors: TensorLoader,
        namespace: dict[str, Any],
        kept: frozenset[type] = frozenset(),
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._kept = kept

        def weak(referent: object, make: Any) -> Any:
            """Return a weak reference to an object that lives as long as the namespace; a dead one to None."""
            if referent is None:
                return make(set())
            namespace.setdefault("__referred__", []).append(referent)
            return make(referent)

        # Not a method of this object: in a reference cycle, the loaded value would live until a garbage collection.
        self._own: dict[str, Callable[..., Any]] = {
            "_tensor": tensors.tensor,
            "_storage": tensors.storage,
            "_typed_storage": tensors.typed_storage,
            "_main": lambda: namespace,
            "_weak": weak,
        }

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the object for a name in the pickle."""
        if module == __name__ and name in self._own:
            return self._own[name]
        found = super().find_class(module, name)
        return classes.when_loaded(name, found, self._kept)
