"""Objects of a notebook that pickle can't write, or would write by a name that no host has.

`functools.lru_cache`, `functools.cached_property`, `functools.singledispatch` and `typing.NewType` make such objects in
a cell: they are rebuilt on the host from their parts. So are tables of weak references, `contextvars.ContextVar` and
`threading.local`, with their current content, and type variables. The notebook's stdout and stderr, and IPython's
`open`, `exit`, `quit` and `display`, are replaced by the host's own. So are the environment, random generators that
functions of a module share, and marks that code compares by identity.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import io
import pickle
import pkgutil
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any

LruCached: Any = type(functools.lru_cache(len))
# Attributes of a function that it has made.
_SINGLEDISPATCH = {
    "dispatch",
    "register",
    "registry",
    "__wrapped__",
}
# Objects of which each process has one. A copy of the environment would take the notebook's secrets along; copies of a
# generator, as in `from random import randint`, would draw the same numbers on all ranks, whatever they seed.
_OF_EACH_PROCESS = (
    ("os", "environ"),
    ("os", "environb"),
    ("random", "_inst"),
    ("numpy.random.mtrand", "_rand"),
    ("torch", "default_generator"),
    ("dataclasses", "MISSING"),
    ("dataclasses", "KW_ONLY"),
)
_OF_TYPES = ("ParamSpec", "TypeVarTuple")  # cloudpickle handles TypeVar itself


def reduced(obj: Any) -> Any:
    """Return how to pickle one of these objects, as `__reduce__` does; NotImplemented for any other object.

    Raises `pickle.PicklingError` for one that pickle would only write as a name in the notebook's `__main__`.
    """
    own = _in_place_of(obj)
    if own:
        return getattr, own
    if _is_display(obj):
        return pkgutil.resolve_name, ("distmagic.remote.rank.show:display",)
    if type(obj) is functools.cached_property:
        # Without its lock, which it has before Python 3.12. Its name is not set a second time.
        state = {
            name: value
            for name, value in vars(obj).items()
            if name not in ("func", "lock")
        }
        return functools.cached_property, (obj.func,), state
    if isinstance(obj, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        return type(obj), (dict(obj),)
    if isinstance(obj, LruCached) and obj.__module__ == "__main__":
        return _lru_cached, (obj.__wrapped__, obj.cache_parameters())
    if isinstance(obj, typing.NewType) and obj.__module__ == "__main__":
        return typing.NewType, (obj.__name__, obj.__supertype__), vars(obj)
    if (
        isinstance(obj, types.FunctionType)
        and obj.__module__ == "__main__"
        and vars(obj).keys() >= _SINGLEDISPATCH
    ):
        dispatching: Any = obj
        default = (dispatching.registry[object],)
        registry = dict(dispatching.registry)
        return functools.singledispatch, default, registry, None, None, _register_all
    made = _reduced_standard(obj)
    if made is NotImplemented and _is_by_name_only(obj):
        raise pickle.PicklingError(
            "pickle writes its name only, and a host has nothing of this name"
        )
    return made


def _in_place_of(obj: Any) -> tuple[types.ModuleType, str] | None:
    """Return the module and name of the host's replacement for this object; None for any other object."""
    if obj is sys.stdout:
        return sys, "stdout"
    if obj is sys.stderr:
        return sys, "stderr"
    for module, name in _OF_EACH_PROCESS:
        loaded = sys.modules.get(module)
        if loaded is not None and obj is getattr(loaded, name, None):
            return loaded, name
    if type(obj).__module__ == "IPython.core.autocall" and "Exit" in type(obj).__name__:
        return builtins, "exit"
    if (
        isinstance(obj, types.FunctionType)
        and getattr(obj, "__wrapped__", None) is io.open
    ):
        is_of_ipython = obj.__globals__.get("__name__", "").startswith("IPython.")
        return (builtins, "open") if is_of_ipython else None
    return None


def _is_display(obj: Any) -> bool:
    return (
        isinstance(obj, types.FunctionType)
        and obj.__name__ == "display"
        and str(obj.__module__).startswith("IPython.")
    )


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
    if type(obj) is threading.local:
        return threading.local, (), vars(obj)
    if type(obj).__module__ == "_abc":
        # Left in a function by `functools.wraps` of an abstract class; a class makes its own.
        return type(None), ()
    is_of_types = type(obj).__module__ == "typing" and type(obj).__name__ in _OF_TYPES
    if is_of_types and obj.__module__ == "__main__":
        return type(obj), (obj.__name__,)
    return NotImplemented


def _is_by_name_only(obj: Any) -> bool:
    own = getattr(obj, "__dict__", None)
    if type(own) is not dict or own.get("__module__") != "__main__":
        return False
    # cloudpickle handles these itself.
    is_known = isinstance(
        obj, (type, types.FunctionType, typing.TypeVar, classmethod, staticmethod)
    )
    return not is_known and isinstance(obj.__reduce_ex__(5), str)


# Called by the pickle when it is loaded.


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
