"""Pickles an object for a parcel.

It uses cloudpickle, with these exceptions:

- tensors and storages become numbers in a table, and their memory is stored after the pickle (see
  storages.py);
- functions of `__main__` get the globals of the loading `__main__`, and the names that it defines
  are included in a table;
- functions that share a variable of a function around them still share it;
- some kinds of objects are reduced in another way (see reductions/): torch's, weak references,
  exceptions, classes, and what a cell defines and pickle only refers to by name;
- small values that no code uses are included in the table, pickled one by one (see by_name.py);
- for another minor version of Python, code becomes source (see reductions/source_form.py); all
  other code keeps its file name, by which tracebacks and `inspect` find its lines;
- the code and the modules that the pickle refers to are recorded (see seen.py).
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

from distmagic.remote.values import by_name
from distmagic.remote.values.reductions import (
    cell_objects,
    classes,
    placeholders,
    python_objects,
    torch_objects,
)
from distmagic.remote.values.reductions.source_form import SourceForm
from distmagic.remote.values.seen import Seen
from distmagic.remote.values.storages import Storages, TensorRow, Window, reduced_array

# Raises for an object that must not be sent although it could be pickled.
Refuse = Callable[[object], None]


class Packer:
    """Pickles one value for a parcel, and holds its buffers until they are written.

    With `source`, code is pickled as source. `aside_of`: the value is only included for lookups by
    name in these globals, so objects that only a function's globals refer to are left out.
    """

    def __init__(
        self,
        sink: Any,
        seen: Seen,
        refuse: Refuse | None,
        source: SourceForm | None = None,
        aside_of: Mapping[str, object] | None = None,
    ) -> None:
        self._storages = Storages()
        self._buffers: list[memoryview] = []
        self._seen = seen
        self._refuse = refuse
        self._source = source
        self._is_aside = aside_of is not None
        # The globals that become those of `__main__`; None: of all functions of `__main__`.
        self._main = aside_of
        self._definitions: dict[str, object] = {}
        # {id of a function's cell: the cell, and the empty one from which it is made when it is
        # loaded}
        self._cells: dict[int, tuple[CellType, CellType]] = {}
        self._pickler = _pickler_class()(
            sink, 5, lambda buffer: self._buffers.append(buffer.raw())
        )
        self._pickler.packer = self

    def pickle(
        self, value: object, namespace: Mapping[str, object] | None = None
    ) -> None:
        """Pickle the value, followed by the table of all definitions of `__main__` that it uses.

        Call only once. With the notebook's `namespace`, also the values that a rank may look up by
        name.
        """
        self._main = self._main or namespace
        try:
            self._pickler.dump(value)
            asides: dict[str, object] = {}
            if namespace is not None:
                found = self._small_values(namespace)
                asides.update(by_name.asides(found, namespace, self._seen))
            self._pickler.dump(asides | self._definitions)
        finally:
            # It refers to this packer: a reference cycle would keep both, and the value, alive.
            del self._pickler

    def _small_values(
        self, namespace: Mapping[str, object]
    ) -> dict[str, tuple[bytes, Seen]]:
        """Return the pickles of values for lookups by name, without those that the value uses
        anyway.
        """
        room = by_name.MAX_ALL_BYTES
        found: dict[str, tuple[bytes, Seen]] = {}
        for name, value in reversed(list(namespace.items())):
            # Pickling runs arbitrary code. A value that fails is only missing if it is looked up.
            with contextlib.suppress(Exception):
                if name in self._definitions or not by_name.is_offered(name, value):
                    continue
                sink, seen = by_name.Small(), Seen()
                packer = Packer(sink, seen, self._refuse, self._source, namespace)
                packer.pickle(value)
                room -= sink.tell()
                if room >= 0 and not any(packer.plan()):
                    found[name] = sink.getvalue(), seen
        # Oldest first: `__subclasses__()` has this order.
        return dict(reversed(found.items()))

    def plan(self) -> tuple[list[memoryview], list[Window], list[TensorRow]]:
        """Return the data stored after the pickle: buffers in order, the windows of storages, and
        their table.
        """
        return self._buffers, *self._storages.plan()

    def reduce(self, obj: Any) -> Any:
        """Return how to pickle `obj`, as `__reduce__` does; None leaves it to cloudpickle.

        Also records notes.
        """
        if type(obj) in python_objects.WEAK:
            return python_objects.reduced_weak(obj)
        of_a_cell = cell_objects.reduced(obj)
        if of_a_cell:
            self._note_global(obj)
            return of_a_cell
        if self._refuse is not None:
            self._refuse(obj)
        if isinstance(obj, CodeType):
            return self._reduce_code(obj)
        if isinstance(obj, ModuleType):
            return self._reduce_module(obj)
        function = cell_objects.function_in(obj)
        if function is not None:
            self._seen.codes.append(function.__code__)
            self._note_global(function)
            made = cell_objects.reduced_decorated(obj, function, placeholders.MAIN)
            if made:
                return made
        if isinstance(obj, (type, FunctionType, BuiltinFunctionType)):
            self._note_global(obj)
        elif obj is placeholders.MAIN:
            return placeholders.main, ()
        else:
            return self._reduce_object(obj)
        return None

    def _reduce_object(self, obj: Any) -> Any:
        reduced = None
        if "torch" in sys.modules:
            stored = self._storages.reduced(obj)
            of_call = self._seen if self._refuse is not None else None
            reduced = torch_objects.reduced(obj, stored, of_call)
        reduced = reduced or reduced_array(obj) or cell_objects.reduced_kept(obj)
        if reduced or type(obj) in copyreg.dispatch_table:
            return reduced
        if isinstance(obj, Exception):
            return python_objects.reduced_exception(obj)
        reduced = cell_objects.reduced_instance(obj)
        return reduced or python_objects.reduced_with_getattr(obj)

    def _reduce_module(self, module: ModuleType) -> Any:
        """Pickle a module by its import name, even one of a special class (`torch.backends`)."""
        name = module.__name__
        if sys.modules.get(name) is not module:
            for key, loaded in sys.modules.copy().items():
                if loaded is module:
                    name = key
        self._seen.modules.add(name)
        # A part of distmagic that hosts lack: cloudpickle adds any loaded submodule whose name a
        # function mentions (`x.state` and distmagic.state).
        is_remote = f"{name}.".startswith(_REMOTE)
        if name.startswith("distmagic.") and not is_remote:
            return __import__, ("distmagic",)
        if goes_by_value(name):
            kept = {k: v for k, v in vars(module).items() if k not in _OF_AN_IMPORT}
            return _module_by_value, (name,), kept
        if name in sys.modules:
            return importlib.import_module, (name,)
        while name and name not in sys.modules:
            name = name.rpartition(".")[0]
        # `torch.ops.aten` is only an attribute
        return python_objects.by_path(
            module, f"{name}:{module.__name__[len(name) + 1 :]}"
        )

    def _reduce_code(self, code: CodeType) -> Any:
        """Pickle code with its file name. cloudpickle 3.1.3 gives all code the same name."""
        if code.co_filename == _NAMELESS:
            return None
        self._seen.codes.append(code)
        if self._source is not None:
            return None
        return _code_of_file, (code.replace(co_filename=_NAMELESS), code.co_filename)

    def adapted(self, obj: Any, plain: Any) -> Any:
        """Return how to pickle `obj` instead of cloudpickle's way, which is `plain`."""
        is_by_value = plain is not NotImplemented
        if type(obj) is FunctionType and is_by_value:
            plain = self._adapted_function(obj, plain)
        is_class = isinstance(obj, type) and is_by_value
        if is_class:
            classes.add_left_out(obj, plain)
        if self._source is not None:
            plain = self._source.reduced(obj, plain)
        return classes.whole(obj, plain) if is_class else plain

    def _adapted_function(self, function: FunctionType, plain: Any) -> Any:
        """Add submodules, leave out some globals, and make functions that share a variable share it
        again: cloudpickle gives each function cells of its own.
        """
        make, (*args, closure), state, *rest = plain
        if closure is not None:
            closure = tuple(
                self._cells.setdefault(id(cell), (cell, CellType()))[1]
                for cell in function.__closure__ or ()
            )
        plain = make, (*args, closure), state, *rest
        _add_submodules(function.__code__, state[1])
        is_of_main = function.__globals__.get("__name__") == "__main__"
        only = self._seen.only if is_of_main else None
        if only is None and not self._is_aside:
            return plain
        return by_name.with_fewer_globals(plain, only)

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
            isinstance(obj, FunctionType)
            and obj.__globals__.get("__name__") == "__main__"
            # A program that `%run` has executed has globals of its own.
            and (self._main is None or obj.__globals__ is self._main)
        ):
            self._pickler.globals_ref.setdefault(id(obj.__globals__), placeholders.MAIN)


_REMOTE = "distmagic.remote."
_OF_AN_IMPORT = ("__builtins__", "__loader__", "__spec__", "__cached__")


def _by_value() -> set[str]:
    import cloudpickle

    return cloudpickle.list_registry_pickle_by_value()  # type: ignore[no-any-return]


def goes_by_value(name: str) -> bool:
    """Whether the module of this name is pickled by value, as `cloudpickle` was asked to."""
    return any(f"{name}.".startswith(f"{one}.") for one in _by_value())


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

        packer: Packer

        def reducer_override(self, obj: Any) -> Any:
            reduced = self.packer.reduce(obj)
            if reduced:
                return reduced
            return self.packer.adapted(obj, super().reducer_override(obj))

    return Pickler


def _add_submodules(code: CodeType, slots: dict[str, Any]) -> None:
    """Add the submodules that functions, lambdas and comprehensions in a function name
    (`xml.dom.minidom`).
    """
    import cloudpickle.cloudpickle as ways

    for one in code.co_consts:
        if isinstance(one, CodeType):
            known = slots["__globals__"].values()
            found = ways._find_imported_submodules(one, known)  # noqa: SLF001
            slots["_cloudpickle_submodules"] += found
            _add_submodules(one, slots)


# Called by the pickle when it is loaded.

_NAMELESS = "<the name of its file follows>"


def _code_of_file(code: CodeType, filename: str) -> CodeType:
    return code.replace(co_filename=filename)


def _module_by_value(name: str) -> ModuleType:
    return sys.modules.setdefault(name, ModuleType(name))
