"""Objects of a notebook that pickle can't write, or would write by a name that no host has.

`functools.lru_cache`, `functools.cached_property`, `functools.singledispatch` and `typing.NewType`
make such objects in a cell: they are rebuilt on the host from their parts. So are tables of weak
references, `contextvars.ContextVar` and `threading.local`, with their current content, type
variables, `struct.Struct`, parsers of arguments, and decorators that `contextlib.contextmanager`
makes. The notebook's stdout and stderr, and IPython's `open`, `exit`, `quit` and `display`, are
replaced by the host's own. So are the environment, random generators that functions of a module
share, marks that code compares by identity, and objects that an installed package keeps.

An object that a decorator has made of a function may hold a lock, like Triton's kernels, or come
from torch.compile. One that can be imported is sent by its name. One that a cell defines is made
again on the host, from the text of its definition.

An object of a user's class that derives from a container, has a `__new__`, or names its `__dict__`,
is rebuilt without calling the class's own methods: its `__init__` may need arguments, and its
`__setitem__` attributes that are not set yet. Objects that share one `__dict__` share it again.
"""

from __future__ import annotations

import contextvars
import copyreg
import functools
import importlib
import inspect
import io
import pickle
import pkgutil
import struct
import sys
import textwrap
import threading
import typing
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from distmagic.remote.system.gc_pause import parsed
from distmagic.remote.values.reductions.source_form import codes_in, futures_of

LruCached: Any = type(functools.lru_cache(len))
# Attributes of a function that it has made.
_SINGLEDISPATCH = {
    "dispatch",
    "register",
    "registry",
    "__wrapped__",
}
# Objects of which each process has one. A copy of the environment would take the notebook's secrets
# along; copies of a generator, as in `from random import randint`, would draw the same numbers on
# all ranks, whatever they seed.
_OF_EACH_PROCESS = (
    ("sys", "stdout"),
    ("sys", "stderr"),
    ("os", "environ"),
    ("os", "environb"),
    ("random", "_inst"),
    ("numpy.random.mtrand", "_rand"),
    ("torch", "default_generator"),
    ("dataclasses", "MISSING"),
    ("dataclasses", "KW_ONLY"),
)
_OF_TYPES = ("ParamSpec", "TypeVarTuple")  # cloudpickle handles TypeVar itself
_PICKLED_OTHERWISE = ("torch", "numpy")
_OF_DYNAMO = "_torchdynamo_orig_callable"
_INNER = (_OF_DYNAMO, "__wrapped__", "fn", "func", "_fn", "function")
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_DEPTH = 8  # nested decorators
_CONTAINERS = (OrderedDict, defaultdict, dict, list, set, deque)
_BASES = (*_CONTAINERS, tuple, float, int, str, bytes, object)
_IN_PYTHON = 1 << 9  # a flag of classes that Python code has made
# A class with one of these pickles its objects in its own way.
_OWN_WAY = {
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__",
}  # fmt: skip


def reduced(obj: Any) -> Any:
    """Return how to pickle one of these objects, as `__reduce__` does; None for any other object.

    Raises `pickle.PicklingError` for one that pickle would only write as a name in the notebook's
    `__main__`.
    """
    for module, name in _OF_EACH_PROCESS:
        loaded = sys.modules.get(module)
        if obj is getattr(loaded, name, None):
            # Pickling the module notes that the value needs it.
            return getattr, (loaded, name)
    path = _path_of(obj)
    if path:
        return pkgutil.resolve_name, (path,)
    if type(obj) is functools.cached_property:
        # Without its lock, which it has before Python 3.12. Its name is not set a second time.
        state = vars(obj).copy()
        state.pop("lock", None)
        return functools.cached_property, (state.pop("func"),), state
    if isinstance(obj, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        return type(obj), (dict(obj),)
    if isinstance(obj, LruCached) and obj.__module__ == "__main__":
        return _lru_cached, (obj.__wrapped__, obj.cache_parameters()), dict(vars(obj))
    if isinstance(obj, typing.NewType) and obj.__module__ == "__main__":
        return typing.NewType, (obj.__name__, obj.__supertype__), vars(obj)
    if (
        isinstance(obj, FunctionType)
        and obj.__module__ == "__main__"
        and vars(obj).keys() >= _SINGLEDISPATCH
    ):
        dispatching: Any = obj
        default = (dispatching.registry[object],)
        registry = dict(dispatching.registry)
        return functools.singledispatch, default, registry, None, None, _register_all
    made = _reduced_standard(obj)
    if made is None and _is_by_name_only(obj):
        raise pickle.PicklingError(
            "pickle writes its name only, and a host has nothing of this name"
        )
    return made


def _path_of(obj: Any) -> str:
    """Return the path at which each host has its own such object; "" for any other object."""
    if type(obj).__module__ == "IPython.core.autocall" and "Exit" in type(obj).__name__:
        return "builtins:exit"
    of_generic: Any = typing.Generic.__class_getitem__
    if obj is getattr(of_generic, "__func__", None):  # a generic NamedTuple has it
        return "typing:Generic.__class_getitem__.__func__"
    if isinstance(obj, FunctionType):
        if not str(obj.__globals__.get("__name__")).startswith("IPython."):
            return ""
        if getattr(obj, "__wrapped__", None) is io.open:
            return "builtins:open"
        if obj.__name__ in ("display", "clear_output"):
            return f"distmagic.remote.rank.show:{obj.__name__}"
    return ""


def reduced_kept(obj: object) -> Any:
    """Return how to pickle an object of a package's own class that the package keeps, such as
    `mpmath.mp`: by its name.

    Functions of the package use that one, and a copy would be another one. None for any other
    object.
    """
    top = str(type(obj).__module__).partition(".")[0]
    module_name, name = _kept_objects(top, len(sys.modules)).get(id(obj), ("", ""))
    module = sys.modules.get(module_name)
    if module is None or getattr(module, name, None) is not obj:
        return None
    return _kept, (module, name, type(obj))


@functools.lru_cache(maxsize=64)
def _kept_objects(top: str, _loaded: int) -> dict[int, tuple[str, str]]:
    """Return {id of an object: module and public name} for an installed package; `_loaded` modules,
    which may grow.
    """
    found: dict[int, tuple[str, str]] = {}
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    if "-packages/" not in file or top in _PICKLED_OTHERWISE:
        return found
    for module_name, module in sys.modules.copy().items():
        if module_name.partition(".")[0] != top or "._" in module_name:
            continue
        for name, value in getattr(module, "__dict__", {}).copy().items():
            is_own = str(type(value).__module__).partition(".")[0] == top
            if is_own and not name.startswith("_"):
                found.setdefault(id(value), (module_name, name))
    return found


def _reduced_standard(obj: Any) -> Any:
    if isinstance(obj, contextvars.ContextVar):
        for module, loaded in sys.modules.copy().items():
            values = getattr(loaded, "__dict__", {}) if module != "__main__" else {}
            for name in [n for n, value in values.copy().items() if value is obj]:
                return pkgutil.resolve_name, (f"{module}:{name}",)
        found: list[tuple[object, ...]] = []
        for context in (contextvars.Context(), contextvars.copy_context()):
            try:
                found.append((context.run(obj.get),))
            except LookupError:
                found.append(())
        return _context_var, (obj.name, *found)
    if type(obj).__module__ == "_abc":
        # Left in a function by `functools.wraps` of an abstract class; a class makes its own.
        return type(None), ()
    is_of_types = type(obj).__module__ == "typing" and type(obj).__name__ in _OF_TYPES
    if is_of_types and obj.__module__ == "__main__":
        return type(obj), (obj.__name__,)
    return _reduced_parts(obj)


def _reduced_parts(obj: Any) -> Any:
    is_own = type(obj) is threading.local or _is_of_user(type(obj))
    if isinstance(obj, threading.local) and is_own:
        return copyreg.__newobj__, (type(obj),), vars(obj)  # type: ignore[attr-defined]
    if type(obj) is struct.Struct:
        return struct.Struct, (obj.format,)
    generator = None
    if type(obj).__module__ == "contextlib":
        generator = getattr(obj, "gen", None)
    if inspect.isgenerator(generator):
        # A function that it decorates makes a new generator for each call.
        if inspect.getgeneratorstate(generator) != inspect.GEN_CREATED:
            return None
        return type(obj), (obj.func, obj.args, obj.kwds)
    parsers = sys.modules.get("argparse")
    if parsers and isinstance(obj, (parsers.Action, parsers.ArgumentParser)):
        made = obj.__reduce_ex__(5)
        is_usual = len(made) > 2 and not hasattr(obj, "__setstate__")
        if is_usual and type(made[2]) is dict:
            return *made[:3], None, None, _fill_parser
    return None


def _is_by_name_only(obj: Any) -> bool:
    own = getattr(obj, "__dict__", None)
    if type(own) is not dict or own.get("__module__") != "__main__":
        return False
    # cloudpickle handles these itself.
    is_known = isinstance(
        obj, (type, FunctionType, typing.TypeVar, classmethod, staticmethod)
    )
    return not is_known and isinstance(obj.__reduce_ex__(5), str)


def function_in(obj: object) -> FunctionType | None:
    """Return the function from which a decorator has made such an object (see above); None for any
    other object.
    """
    inner: Any = obj
    is_bound = False
    for _ in range(_DEPTH):
        own = getattr(inner, "__dict__", None)
        if type(own) is not dict:
            break
        if isinstance(inner, FunctionType) and _OF_DYNAMO not in own:
            break
        is_bound |= _OF_DYNAMO in own or any(type(x) in _LOCKS for x in own.values())
        inner = next((own[name] for name in _INNER if callable(own.get(name))), None)
    if not is_bound or not isinstance(inner, FunctionType):
        return None
    return inner


def reduced_decorated(obj: object, function: FunctionType, main: object) -> Any:
    """Return how to pickle an object made of `function`, as `__reduce__` does; `main` stands for
    `__main__`.

    None for an object without the function's name, or if its source is unknown.
    """
    name = function.__qualname__
    if function.__globals__.get(name) is not obj:
        return None
    module = sys.modules.get(function.__module__)
    if module is not None and function.__module__ != "__main__":
        return getattr, (module, name)
    code = function.__code__
    try:
        lines, first = inspect.getsourcelines(code)
    except OSError:
        return None
    definition = textwrap.dedent("".join(lines))
    if not getattr(parsed(definition).body[0], "decorator_list", ()):
        return None  # it was made by a call, which is in no known text
    text = "\n" * (first - 1) + definition
    place = text, code.co_filename, futures_of(code)
    used = {}
    whole = compile(*place[:2], "exec", place[2], dont_inherit=True)
    for inner in codes_in(whole):
        for one in inner.co_names:
            if one != name and one in function.__globals__:
                used[one] = function.__globals__[one]
    return _made_anew, (*place, name, used, main)


def reduced_instance(obj: Any) -> Any:
    """Return how to pickle an object of such a class without calling it; None for any other
    object.
    """
    kind: Any = type(obj)
    base = next(one for one in kind.__mro__ if one in _BASES)
    maker = next(one for one in kind.__mro__ if "__new__" in vars(one))
    is_made = maker not in _BASES and "_fields" not in vars(maker)
    definer = maker if is_made else kind
    if not (_is_of_user(kind) and _is_of_user(definer)):
        return None
    # It may keep a single object, or register each.
    is_made = is_made and not (base is object and _takes_nothing(kind))
    is_made |= maker is object and _sets_dict(kind)
    if not is_made and base not in _CONTAINERS:
        return None
    for one in kind.__mro__:
        if one in (*_BASES, Counter) or "_fields" in vars(one):
            continue
        is_in_python = one.__flags__ & _IN_PYTHON
        has_own_way = _OWN_WAY & vars(one).keys() or vars(one).get("__slots__")
        if has_own_way or not is_in_python:
            return None
    own = getattr(obj, "__dict__", None)
    value = base.__getnewargs__(obj) if base not in (*_CONTAINERS, object) else ()
    content: tuple[Any, ...] = ()
    if issubclass(base, dict):
        content = (dict(base.items(obj)),)
    elif base in _CONTAINERS:
        content = (list(base.__iter__(obj)),)
    if base is defaultdict:
        content = obj.default_factory, *content
    if base is deque:
        content = *content, obj.maxlen
    state = own, base, content
    return _instance, (base, kind, *value), state, None, None, _fill_instance


def _sets_dict(kind: Any) -> bool:
    """Whether a method mentions `__dict__`: the object's may be one that others have, too."""
    methods = [
        getattr(one, "__func__", one)
        for base in kind.__mro__
        if base not in _BASES and _is_of_user(base)
        for one in vars(base).values()
    ]
    return any(
        "__dict__" in one.__code__.co_names
        for one in methods
        if isinstance(one, FunctionType)
    )


def _takes_nothing(kind: Any) -> bool:
    """Whether `kind.__new__(kind)`, which pickle calls, has all arguments."""
    try:
        inspect.signature(kind.__new__).bind(kind)
    except (TypeError, ValueError):
        return False
    return True


def _is_of_user(kind: type) -> bool:
    """Whether a class is defined in a cell, or in Python in a module of the user."""
    name = kind.__module__
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    is_standard = name.partition(".")[0] in sys.stdlib_module_names
    is_in_file = file.endswith(".py") and "-packages/" not in file
    return name == "__main__" or (is_in_file and not is_standard)


# Called by the pickle when it is loaded.


def _instance(base: Any, kind: type, *value: object) -> Any:
    return base.__new__(kind, *value)


def _fill_instance(obj: Any, state: tuple[Any, Any, tuple[Any, ...]]) -> None:
    own, base, content = state
    if own is not None:
        object.__setattr__(obj, "__dict__", own)
    if base is OrderedDict:  # its `__init__` would call the class's `__setitem__`
        for key, value in content[0].items():
            base.__setitem__(obj, key, value)
    elif base in _CONTAINERS:
        base.__init__(obj, *content)


def _fill_parser(part: Any, state: dict[str, Any]) -> None:
    """Set attributes of a parser or of its argument: argparse compares a text by identity."""
    suppress: Any = importlib.import_module("argparse").SUPPRESS
    for name, value in state.items():
        is_suppress = type(value) is str and value == suppress
        vars(part)[name] = suppress if is_suppress else value


def _kept(module: ModuleType, name: str, kind: type) -> object:
    """Return the object that a package keeps under a name.

    Raises AttributeError if it is of another class on this host.
    """
    found = getattr(module, name)
    if not isinstance(found, kind):
        here = type(found).__name__
        text = f"{module.__name__}.{name} is a {kind.__name__} in the notebook, and a {here} on this host"
        raise AttributeError(text)  # noqa: TRY004 - as if the host lacked it
    return found


def _context_var(
    name: str, default: tuple[object, ...], value: tuple[object, ...]
) -> contextvars.ContextVar[Any]:
    made: contextvars.ContextVar[Any] = contextvars.ContextVar(name)
    if default:
        made = contextvars.ContextVar(name, default=default[0])
    if value:
        made.set(value[0])
    return made


def _lru_cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _register_all(
    dispatching: Any, registry: Mapping[type, Callable[..., Any]]
) -> None:
    for kind, function in registry.items():
        dispatching.register(kind, function)


def _made_anew(
    text: str,
    filename: str,
    flags: int,
    name: str,
    used: Mapping[str, object],
    main: dict[str, Any],
) -> object:
    for one, value in used.items():
        main.setdefault(one, value)
    exec(compile(text, filename, "exec", flags, dont_inherit=True), main)  # noqa: S102 - the user's definition
    return main[name]
