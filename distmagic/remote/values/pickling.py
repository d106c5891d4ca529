"""How objects are pickled for a parcel, and unpickled: cloudpickle, but for what is listed here.

- tensors and storages become numbers in a table, their memory goes beside the pickle (see storages.py);
- functions of `__main__` get, where they are loaded, the globals of that `__main__`, and the names that it defines
  come along in a table;
- a DistributedDataParallel module becomes the module in it;
- objects that a cell defines and that pickle knows by name only travel as what made them (see cell_objects.py);
- an object with a lock that a decorator made goes by its name, or as its text (see decorated.py);
- weak references keep alive what they refer to;
- what the notebook has by name and no code uses comes along in the table, pickled one by one (see by_name.py);
- for a Python of another minor version code becomes source (see source_form.py); all other code keeps the name of its
  file, which is what a traceback, or `inspect`, finds its lines by;
- notes are taken of the code and the modules that the pickle refers to.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distmagic.remote.values import by_name, cell_objects, decorated
from distmagic.remote.values.side_files import SideFile
from distmagic.remote.values.source_form import SourceForm
from distmagic.remote.values.storages import Storages, TensorLoader, TensorRow, Window


@dataclass
class Seen:
    """Notes on a parcel: code that travels in it, modules that it needs at the other end, its SHA-256, its side files.

    `annotated` are names in annotations that are texts.
    """

    codes: list[types.CodeType] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    annotated: set[str] = field(default_factory=set)
    sha256: Any = field(default_factory=hashlib.sha256)
    side_files: list[SideFile] = field(default_factory=list)


# Raises for an object that must not travel although it could be pickled.
Refuse = Callable[[object], None]


class Packer:
    """Pickles one value for a parcel, and holds its buffers until they are written. With `source`, code goes as source.

    `is_aside`: the value goes for its name alone, and no object comes along of which only a function's globals know.
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
        """Pickle the value, and after it the table of all that `__main__` defines and the value uses. Only once.

        With a `namespace`, the notebook's, also what a rank may ask for by its name there.
        """
        try:
            self._pickler.dump(value)
            asides = {} if namespace is None else self._asides(namespace)
            self._pickler.dump(asides | self._definitions)
        finally:
            del self._pickler  # it refers to this packer: the two would keep each other, and the value, alive

    def _asides(self, namespace: Mapping[str, object]) -> dict[str, object]:
        """Return what is offered for its name, without what the value uses anyway."""
        room = by_name.MAX_ALL_BYTES
        found: dict[str, tuple[bytes, Seen]] = {}
        for name, value in reversed(list(namespace.items())):
            # Pickling runs anybody's code. What can't travel is missed only where it is asked for.
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
        for name, value in namespace.items():  # `__subclasses__()` has their order
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
        """Return what goes beside the pickle: its buffers in order, the windows of storages, and their table."""
        return self._buffers, *self._storages.plan()

    def reduce(self, obj: Any) -> Any:
        """Return how to pickle `obj`, as `__reduce__` does; NotImplemented leaves it to cloudpickle. Also takes notes."""
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
        function = decorated.function_in(obj)
        if function is not None:
            self._seen.codes.append(function.__code__)
            self._note_global(function)
            made = decorated.reduced(obj, function, _MAIN)
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
        if type(obj) is weakref.ref:
            return _weak, (obj(),)
        reduced = self._reduce_torch(obj) if "torch" in sys.modules else NotImplemented
        if reduced is not NotImplemented or type(obj) in copyreg.dispatch_table:
            return reduced
        if isinstance(obj, Exception):
            return _reduced_exception(obj)
        if isinstance(getattr(type(obj), "__getattr__", None), types.FunctionType):
            # Have an object whose class has a `__getattr__` get its state without a look at `__setstate__` of an empty one.
            # `self.values[name]` in a `__getattr__` asks for `values` without end before there is any state.
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
        """Have a module go by the name that an import finds it by, also one of a class of its own (`torch.backends`)."""
        name = module.__name__
        if sys.modules.get(name) is not module:
            for key, loaded in sys.modules.copy().items():
                if loaded is module:
                    name = key
        self._seen.modules.add(name)
        # Of the half of distmagic that a host lacks: cloudpickle adds any loaded submodule whose name a function mentions
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
        # `torch.ops.aten` is an attribute only
        path = f"{name}:{module.__name__[len(name) + 1 :]}"
        with contextlib.suppress(AttributeError, ValueError):
            if pkgutil.resolve_name(path) is module:
                return pkgutil.resolve_name, (path,)
        return NotImplemented

    def _reduce_code(self, code: types.CodeType) -> Any:
        """Have code keep the name of its file. cloudpickle 3.1.3 gives all code the same name."""
        if code.co_filename == _NAMELESS:
            return NotImplemented
        self._seen.codes.append(code)
        if self.source is not None:
            return NotImplemented
        return code_of_file, (code.replace(co_filename=_NAMELESS), code.co_filename)

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
            return NotImplemented if number is None else (_tensor, (number,))
        if isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
            return _storage, (self._storages.add_storage(obj),)
        if isinstance(obj, torch.storage.TypedStorage):
            storage = obj._untyped_storage  # noqa: SLF001 - the public way warns
            if storage.device.type != "meta":
                return _typed_storage, (
                    self._storages.add_storage(storage),
                    str(obj.dtype).removeprefix("torch."),
                )
        ddp = sys.modules.get("torch.nn.parallel.distributed")
        if ddp is not None and isinstance(obj, ddp.DistributedDataParallel):
            return _same, (obj.module,)
        return NotImplemented


def _reduced_exception(error: Exception) -> Any:
    """Have an exception with an `__init__` of its own made without it: what that wants is mostly not what `args` are."""
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


def _set_state(obj: Any, state: Any) -> None:
    """Give an object its attributes, as pickle does where a class has no `__setstate__`."""
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
    """Have these modules, and what they define, go into a pickle themselves, and not by their names, inside the block."""
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
        """cloudpickle's pickler, asking a `Packer` first."""

        def __init__(
            self, sink: Any, packer: Packer, keep: Callable[[pickle.PickleBuffer], None]
        ) -> None:
            super().__init__(sink, protocol=5, buffer_callback=keep)
            self._packer = packer

        def reducer_override(self, obj: Any) -> Any:
            reduced = self._packer.reduce(obj)
            if reduced is not NotImplemented:
                return reduced
            plain = super().reducer_override(obj)
            if self._packer.is_aside and type(obj) is types.FunctionType:
                plain = by_name.without_objects(plain)
            source = self._packer.source
            return plain if source is None else source.reduced(obj, plain)

    return Pickler


# What the pickle calls to build things. `Loader.find_class` puts its own in their place.

_ONLY = "a parcel is opened by parcel.load only"
_NAMELESS = "<the name of its file follows>"


def code_of_file(code: types.CodeType, filename: str) -> types.CodeType:
    """Return code that belongs to a file, or to a cell, of this name."""
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
    """Unpickles, with the names above bound to one parcel's memory and one namespace."""

    def __init__(
        self, file: Any, buffers: Any, tensors: TensorLoader, namespace: dict[str, Any]
    ) -> None:
        super().__init__(file, buffers=buffers)

        def weak(referent: object) -> Any:
            """Return a weak reference to what lives as long as the namespace does; a dead one to None."""
            if referent is None:
                return weakref.ref(set())
            namespace.setdefault("__referred__", []).append(referent)
            return weakref.ref(referent)

        # No method of this object: in a circle, what it has loaded would live on until a garbage collection.
        self._own = {
            "_tensor": tensors.tensor,
            "_storage": tensors.storage,
            "_typed_storage": tensors.typed_storage,
            "_main": lambda: namespace,
            "_weak": weak,
        }

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the object that a name in the pickle stands for."""
        if module == __name__ and name in self._own:
            return self._own[name]
        return super().find_class(module, name)
