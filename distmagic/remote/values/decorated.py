"""Objects that a decorator has made of a function and that can't be pickled: they hold a lock, like Triton's kernels,
or come from torch.compile.

An object that can be imported is sent by its name. One that a cell defines is made again on the rank, from the text of
its definition.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import threading
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

from distmagic.remote.values.source_form import futures_of

_OF_DYNAMO = "_torchdynamo_orig_callable"
_INNER = (_OF_DYNAMO, "__wrapped__", "fn", "func", "_fn", "function")
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_DEPTH = 8  # nested decorators


def function_in(obj: object) -> FunctionType | None:
    """Return the function from which such an object was made; None for any other object."""
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


def reduced(obj: object, function: FunctionType, main: object) -> Any:
    """Return how to pickle an object made of `function`, as `__reduce__` does; `main` stands for `__main__`.

    NotImplemented for an object without the function's name, or if its source is unknown.
    """
    name = function.__qualname__
    if function.__globals__.get(name) is not obj:
        return NotImplemented
    module = sys.modules.get(function.__module__)
    if module is not None and function.__module__ != "__main__":
        return getattr, (module, name)
    code = function.__code__
    try:
        lines, first = inspect.getsourcelines(code)
    except OSError:
        return NotImplemented
    definition = textwrap.dedent("".join(lines))
    if not getattr(ast.parse(definition).body[0], "decorator_list", ()):
        return NotImplemented  # it was made by a call, which is in no known text
    text = "\n" * (first - 1) + definition
    place = text, code.co_filename, futures_of(code)
    used = {}
    for one in _names(compile(*place[:2], "exec", place[2], dont_inherit=True)):
        if one != name and one in function.__globals__:
            used[one] = function.__globals__[one]
    return _made_anew, (*place, name, used, main)


def _names(code: CodeType) -> list[str]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return [*code.co_names, *(name for one in inner for name in _names(one))]


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
