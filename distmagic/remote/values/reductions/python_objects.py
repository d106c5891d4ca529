"""Objects of Python's own kinds that pickle would refuse, or that it writes but can't load."""

from __future__ import annotations

import contextlib
import copyreg
import pkgutil
import weakref
from types import FunctionType
from typing import Any

from distmagic.remote.values.reductions import placeholders

WEAK = (weakref.ref, weakref.WeakMethod, *weakref.ProxyTypes)


def reduced_weak(obj: Any) -> Any:
    """Return how to pickle one of the `WEAK` references: with what it refers to, which then stays
    alive.
    """
    if type(obj) in weakref.ProxyTypes:
        try:
            return placeholders.weak, (obj.__repr__.__self__, weakref.proxy)
        except ReferenceError:
            return placeholders.weak, (None, weakref.proxy)
    referent = obj()
    return placeholders.weak, (referent, weakref.ref if referent is None else type(obj))


def reduced_exception(error: Exception) -> Any:
    """Rebuild an exception without calling its own `__init__`, whose arguments often differ from
    `args`.

    None for one that has its own way.
    """
    kind: Any = type(error)
    builtin = next(one for one in kind.__mro__ if one.__module__ == "builtins")
    is_plain = builtin.__basicsize__ == Exception.__basicsize__
    has_own_init = isinstance(kind.__init__, FunctionType)
    has_own_new = isinstance(kind.__new__, FunctionType)
    own = kind.__reduce__, kind.__reduce_ex__
    has_own_reduction = own != (Exception.__reduce__, Exception.__reduce_ex__)
    if not is_plain or not has_own_init or has_own_new or has_own_reduction:
        return None
    return copyreg.__newobj__, (kind, *error.args), vars(error)  # type: ignore[attr-defined]


def reduced_with_getattr(obj: Any) -> Any:
    """Set the state of an object whose class has a `__getattr__` without looking up `__setstate__`.

    On an empty object, `self.values[name]` in a `__getattr__` would recurse forever. None for
    any other object.
    """
    kind: Any = type(obj)
    if not isinstance(getattr(kind, "__getattr__", None), FunctionType):
        return None
    own = kind.__reduce__, kind.__reduce_ex__
    if own != (object.__reduce__, object.__reduce_ex__):
        return None
    if getattr(kind, "__setstate__", None) is not None:
        return None
    make, args, state, items, pairs = (*obj.__reduce_ex__(5), None, None, None)[:5]
    if state is None:
        return None
    return make, args, state, items, pairs, _set_state


def by_path(obj: object, path: str) -> Any:
    """Return how to pickle an object that `pkgutil.resolve_name` finds; None for any other one."""
    with contextlib.suppress(AttributeError, ValueError):
        if pkgutil.resolve_name(path) is obj:
            return pkgutil.resolve_name, (path,)
    return None


# Called by the pickle when it is loaded.


def _set_state(obj: Any, state: Any) -> None:
    """Set an object's attributes, as pickle does for a class without `__setstate__`."""
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        obj.__dict__.update(attributes)
    for name, value in (slots or {}).items():
        setattr(obj, name, value)
