"""Finds the part of a value that can't be pickled, and describes it: the parts are tried one by
one.

The parts of a function are the variables that it captures; those of any other object are what
pickle itself would visit.
"""

from __future__ import annotations

import copyreg
import functools
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from distmagic.remote.frozen import frozen
from distmagic.remote.values.reductions.cell_objects import LruCached, function_in
from distmagic.remote.values.reductions.source_form import names_in

MAX_TRIALS = 5_000  # limit of parts that are tried; then the part found so far is used
_ATOMS = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    CodeType,
    ModuleType,
)
_CALLED = (FunctionType, MethodType, functools.partial)
TOO_DEEP = "an object that is nested too deeply"

# Returns None for a part that can be pickled.
WhyNot = Callable[[object], "Exception | None"]


class NotToTravel(pickle.PicklingError):
    """An object that could be pickled, but must not be sent; `what` describes it."""

    def __init__(self, value: object, what: str) -> None:
        super().__init__(f"{what} must not travel")
        self.value, self.what = value, what


@frozen
class ValuePart:
    """A part of a value: an expression for it, and the function that uses it ("" if none)."""

    owner: str
    path: str
    value: object


@frozen
class UnpicklablePart:
    """The smallest part that can't be pickled, its description, and pickle's error.

    `around` are the parts in which it is, the outermost first.
    """

    part: ValuePart
    what: str
    error: Exception
    around: tuple[ValuePart, ...] = ()

    @property
    def sentence(self) -> str:
        """`train uses `lock`, a lock, which can't be pickled` (without the full stop)."""
        subject = (
            f"{self.part.owner} uses `{self.part.path}`,"
            if self.part.owner
            else f"{self.part.path} is"
        )
        return f"{subject} {self.what}, which can't be pickled{self.detail}"

    @property
    def detail(self) -> str:
        """Pickle's error in parentheses; "" if `describe` has a better explanation."""
        return (
            ""
            if is_known(self.part.value)
            else f" ({type(self.error).__name__}: {self.error!s:.200})"
        )


def find(
    value: object, name: str, error: Exception, why_not: WhyNot
) -> UnpicklablePart:
    """Return the smallest part of `value` that can't be pickled. Pickling `value` raised `error`.

    `name` is the name of the value itself.
    """
    part = ValuePart(owner="", path=name, value=value)
    # The objects too: an id is reused once its object is gone.
    tried: dict[int, object] = {id(value): value}
    around: tuple[ValuePart, ...] = ()
    while not is_known(part.value):
        if isinstance(error, NotToTravel) and error.value is part.value:
            return UnpicklablePart(part=part, what=error.what, error=error)
        # In a chain of objects the first one is named, because all are equally at fault.
        is_data = not isinstance(part.value, _CALLED)
        is_named = part.owner or name != "the call"
        if "recursion" in str(error) and is_data and is_named:
            return UnpicklablePart(part=part, what=TOO_DEEP, error=error)
        found = _unpicklable_child(part, tried, why_not)
        if found is None:
            break
        around = (*around, part)
        part, error = found
    return UnpicklablePart(
        part=part, what=describe(part.value), error=error, around=around
    )


def _unpicklable_child(
    part: ValuePart, tried: dict[int, object], why_not: WhyNot
) -> tuple[ValuePart, Exception] | None:
    """Return the first part of `part` that can't be pickled, and why; None without one, or at the
    limit of trials.
    """
    for child in parts(part):
        if is_atom(child.value) or id(child.value) in tried:
            continue
        if len(tried) > MAX_TRIALS:
            return None
        tried[id(child.value)] = child.value
        error = why_not(child.value)
        if error is not None:
            return child, error
    return None


def is_atom(value: object) -> bool:
    """Whether a value has no parts, and can always be pickled."""
    return isinstance(value, _ATOMS)


def parts(part: ValuePart) -> Iterator[ValuePart]:
    """Yield the parts of a value."""
    value = part.value
    if isinstance(value, FunctionType):
        for name, used in captured(value):
            yield ValuePart(owner=_name(value), path=name, value=used)
    elif isinstance(value, type):
        yield from _class_parts(part, value)
    elif isinstance(value, MethodType):
        yield below(part, "", value.__func__)
        yield below(part, ".__self__", value.__self__)
    elif isinstance(value, (functools.partial, LruCached)):
        yield from _wrapper_parts(part, value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield below(part, f"[{key!r:.60}]", item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for i, item in enumerate(value):
            yield below(part, f"[{i}]", item)
    else:
        yield from _reduced_parts(part)


def _wrapper_parts(part: ValuePart, partial: Any) -> Iterator[ValuePart]:
    if isinstance(partial, LruCached):
        yield below(part, "", partial.__wrapped__)
        return
    yield below(part, "", partial.func)
    args = [(f"args[{i}]", arg) for i, arg in enumerate(partial.args)]
    for name, arg in [*args, *partial.keywords.items()]:
        yield ValuePart(owner=_name(partial.func), path=name, value=arg)


def enclosed(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield name and value of a function's own variables: its closure and its defaults."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # a variable that was never assigned
    defaults = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=False)
    yield from (function.__kwdefaults__ or {}).items()


def captured(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield name and value of the outside variables that a function uses, and of its defaults."""
    yield from enclosed(function)
    for name in dict.fromkeys(names_in(function.__code__, "LOAD_GLOBAL", "LOAD_NAME")):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    yield from vars(function).items()  # set by decorators: __wrapped__


def travels_by_value(value: object) -> bool:
    """Whether a function or class is pickled by value, because no module has it under its name."""
    if not isinstance(value, (FunctionType, type)):
        return False
    if value.__module__ == "__main__":
        return True
    found: object = sys.modules.get(value.__module__ or "")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not value


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__).replace(
        "<locals>.", ""
    )


def _class_parts(part: ValuePart, cls: type) -> Iterator[ValuePart]:
    if not travels_by_value(cls):
        return
    for name, value in vars(cls).items():
        inner = value
        # Of methods, properties and cached properties.
        for wrapped in (
            "__func__",
            "fget",
            "func",
        ):
            inner = getattr(value, wrapped, None) or inner
        if name not in ("__dict__", "__weakref__"):
            yield ValuePart(owner=cls.__qualname__, path=name, value=inner)
    for base in cls.__bases__:
        yield ValuePart(owner=part.owner, path=base.__qualname__, value=base)


def _reduced_parts(part: ValuePart) -> Iterator[ValuePart]:
    """Yield the parts of an object that its own reduction returns; nothing if that fails."""
    try:
        reduced = part.value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - whatever it raises, the object itself can't be pickled
        return
    if not isinstance(reduced, tuple):
        return
    # The values that __reduce__ may return: a function, its arguments, a state, items of a list,
    # pairs of a dict.
    function, args, state, items, pairs = (*reduced, None, None, None)[:5]
    makes_instance = function in (copyreg.__newobj__, copyreg.__newobj_ex__)  # type: ignore[attr-defined]
    for arg in args[1:] if makes_instance else args:
        yield below(part, "", arg)
    if makes_instance and travels_by_value(args[0]):
        yield ValuePart(owner=part.owner, path=args[0].__qualname__, value=args[0])
    # With slots there are two tables.
    for table in state if isinstance(state, tuple) else (state,):
        if isinstance(table, dict):
            for key, attribute in table.items():
                yield below(part, f".{key}", attribute)
        else:
            yield below(part, "", table)
    for i, item in enumerate(items or ()):
        yield below(part, f"[{i}]", item)
    for key, item in pairs or ():
        yield below(part, f"[{key!r:.60}]", item)


_MODULE_TABLES = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")


def below(part: ValuePart, step: str, value: object) -> ValuePart:
    """Return the part one step down; `model._modules['fc']` becomes `model.fc`."""
    return ValuePart(
        owner=part.owner, path=_MODULE_TABLES.sub(r".\1", part.path + step), value=value
    )


# Descriptions of parts. Known types are not taken apart further, because their internals mean
# nothing to the user.

_KINDS = {
    "_thread.lock": "a lock",
    "_thread.RLock": "a lock",
    "threading.": "a threading.{name}",
    "_io.": "an open file",
    "tempfile._TemporaryFileWrapper": "an open file",
    "builtins.generator": "a generator",
    "builtins.coroutine": "a coroutine",
    "socket.socket": "a socket",
    "torch.jit.ScriptFunction": "a torch.jit.script function",
    "torch.jit._script.ScriptModule": "a torch.jit.script module",
    "torch.cuda.": "a torch.cuda.{name}",
    "torch._library.custom_ops.CustomOpDef": "a torch.library.custom_op",
    "torch.distributed.distributed_c10d.ProcessGroup": "a process group",
    "torch._C._distributed_c10d.ProcessGroup": "a process group",
    "distmagic.outcome.run.Run": "a Run of distmagic",
    "IPython.": "IPython itself",
    "ipykernel.": "IPython itself",
    "ipywidgets.": "a widget",
    "tqdm.": "a progress bar",
    "subprocess.Popen": "a process",
    "multiprocessing.process.BaseProcess": "a process",
    "concurrent.futures._base.Executor": "an executor",
    "sqlite3.Connection": "a database connection",
}


def is_known(value: object) -> bool:
    """Whether `describe` has a special name for a value's type."""
    return _kind(value) is not None


def describe(value: object) -> str:
    """Return a description of a value, with its article: `a lock`, `a torch.compile function`, `a
    my.module.Class`.
    """
    known = _kind(value)
    if known is not None:
        return known
    kind = type(value)
    if kind in (FunctionType, type):
        return f"the {'class' if kind is type else 'function'} {value.__qualname__}"  # type: ignore[attr-defined]
    module = (
        "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    )
    article = "an" if (module or kind.__qualname__)[0].lower() in "aeiou" else "a"
    return f"{article} {module}{kind.__qualname__}"


def _kind(value: object) -> str | None:
    if isinstance(value, FunctionType):
        if value.__module__ == "IPython.core.getipython":
            return "IPython itself"
        return (
            "a torch.compile function"
            if "_torchdynamo_orig_callable" in vars(value)
            else None
        )
    if isinstance(value, MethodType):
        return _kind(value.__self__)
    if isinstance(value, type):
        return None
    if (function := function_in(value)) is not None:
        return f"a {type(value).__qualname__} of the function {function.__qualname__}"
    for cls in type(value).__mro__:
        full = f"{cls.__module__}.{cls.__qualname__.removeprefix(cls.__module__ + '.')}"
        for name, words in _KINDS.items():
            if full == name or (name.endswith(".") and full.startswith(name)):
                return words.format(name=cls.__qualname__)
    return None
