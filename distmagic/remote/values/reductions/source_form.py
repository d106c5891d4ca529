"""Pickles functions and classes as source, for another minor version of Python, which can't run this one's byte code.

A code object is replaced by the text of its cell or module, with its name and line. The other Python compiles the text
and picks the same function. The rest of a function (defaults, closure, globals) is pickled as usual. Methods generated
by `dataclass`, `namedtuple` and `Protocol` have no source: these classes are rebuilt. Other code without source raises
`NoSource`.
"""

from __future__ import annotations
import __future__

import ast
import collections
import dataclasses
import dis
import functools
import inspect
import linecache
import pathlib
import pickle
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

_FUTURES = 0
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag
_OF_DATACLASS = {
    *("__init__", "__repr__", "__eq__", "__hash__", "__match_args__", "__replace__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__setattr__", "__delattr__"),
    *("__dataclass_fields__", "__dataclass_params__"),
}
_OF_PROTOCOL = {
    *("__init__", "__subclasshook__", "_is_protocol", "_is_runtime_protocol"),
    *("__protocol_attrs__", "__non_callable_proto_members__"),
}
_FIELD = ("default", "default_factory", "init", "repr", "hash", "compare", "metadata", "kw_only")  # fmt: skip
_PARAMS = ("init", "repr", "eq", "order", "unsafe_hash", "frozen")
_MADE_IN = ("<string>", dataclasses.__file__, collections.__file__, typing.__file__)


def futures_of(code: types.CodeType) -> int:
    """Return the compiler flags for the `__future__` imports of code."""
    return code.co_flags & _FUTURES


class NoSource(pickle.PicklingError):
    """A function has no source that another Python could compile; contains the reason and a cure."""

    def __init__(self, why: str, cure: str) -> None:
        super().__init__(why)
        self.why, self.cure = why, cure


class SourceForm:
    """Replaces code objects by source for Python `oldest` (major, minor) and later. Use one object for each pickle.

    `call` is the code object of a cell's last expression, and `expression` is its source. Other code objects are found
    by name and line in the text of their cell; `call` is not in that text.
    """

    def __init__(
        self,
        oldest: tuple[int, ...] = sys.version_info[:2],
        call: types.CodeType | None = None,
        expression: str = "",
    ) -> None:
        self._oldest = oldest
        self._call, self._expression = call, expression
        # Each once per pickle, because its memo uses ids.
        self._texts: dict[str, str] = {}

    def reduced(self, obj: Any, plain: Any) -> Any:
        """Return how to pickle an object, as `__reduce__` does; `plain` is cloudpickle's way. Raises `NoSource`."""
        if isinstance(obj, types.CodeType):
            flags = futures_of(obj)
            if obj is self._call:
                is_async = inspect.iscoroutinefunction(types.FunctionType(obj, {}))
                args = (self._expression, obj.co_filename, obj.co_firstlineno)
                return code_of_expression, (*args, flags, is_async)
            text = self._text(obj.co_filename)
            place = (obj.co_filename, flags, obj.co_name, obj.co_firstlineno)
            same = _named(text, *place)
            if obj not in same:
                raise NoSource(
                    f"{obj.co_filename} no longer has its text. The cell has changed since, or other code has made it",
                    "Run its cell again, or restart the kernel",
                )
            return code_of_text, (text, *place, same.index(obj), len(same), obj.co_freevars)  # fmt: skip
        if isinstance(obj, typing.ForwardRef):
            return typing.ForwardRef, (obj.__forward_arg__,)  # without its code
        if isinstance(obj, type) and obj.__module__ == "pathlib._local":
            return getattr, (pathlib, obj.__name__)  # only Python 3.13 has it there
        if isinstance(obj, type) and plain is not NotImplemented:
            return _of_class(obj, plain)
        return plain

    def _text(self, name: str) -> str:
        if name not in self._texts:
            text = "".join(linecache.getlines(name))
            if not text:
                raise NoSource(
                    "its source is not available. It was made by exec or eval, or in a cell with another magic",
                    "Define it with def in a cell, or in a module next to the notebook",
                )
            try:
                ast.parse(text, name, feature_version=self._oldest[:2])  # type: ignore[arg-type]
            except SyntaxError as error:
                version = ".".join(map(str, self._oldest))
                raise NoSource(
                    f"{name} is not for Python {version} (line {error.lineno}: {error.msg})",
                    f"Write it as Python {version} reads it",
                ) from None
            self._texts[name] = text
        return self._texts[name]


def code_of_text(  # noqa: PLR0913, PLR0917 - pickle calls it
    text: str, filename: str, flags: int, name: str, line: int, number: int, of: int, free: tuple[str, ...]
) -> types.CodeType:  # fmt: skip
    """Return the code of a function `name` that starts in `line` of a text: index `number` among the `of` such
    functions.

    Raises ValueError, SyntaxError.
    """
    found = _named(text, filename, flags, name, line)
    if len(found) != of or found[number].co_freevars != free:
        version = ".".join(map(str, sys.version_info[:2]))
        raise ValueError(f"Python {version} has another {name} in line {line} of {filename}")  # fmt: skip
    return found[number]


def code_of_expression(
    text: str,
    filename: str,
    line: int,
    flags: int,
    is_async: bool,  # noqa: FBT001 - pickle calls it
) -> types.CodeType:
    """Return a cell's last expression as the code of a function without arguments."""
    call = ast.parse(text, mode="eval").body
    for node in ast.walk(call):
        if isinstance(node, ast.expr):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = 0
    return code_of_call(call, filename, flags, is_async=is_async)


def code_of_call(
    call: ast.expr, filename: str, flags: int, *, is_async: bool
) -> types.CodeType:
    """Return an expression as the code of a function without arguments, called `<module>` in tracebacks."""
    keyword = "async def" if is_async else "def"
    function = ast.parse(f"{keyword} cell():\n    return None").body[0]
    for node in ast.walk(function):
        if hasattr(node, "lineno"):
            ast.copy_location(node, call)
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    assert isinstance(function.body[0], ast.Return)
    function.body[0].value = call
    module = compile(
        ast.Module([function], []), filename, "exec", flags=flags, dont_inherit=True
    )
    code = next(
        const for const in module.co_consts if isinstance(const, types.CodeType)
    )
    return code.replace(co_name="<module>")


def _named(
    text: str, filename: str, flags: int, name: str, line: int
) -> list[types.CodeType]:
    """Return all code objects with this name and first line, in order, at any depth; depths differ by version."""
    found = []
    for code in _codes(text, filename, flags):
        if (code.co_name, code.co_firstlineno) == (name, line):
            found.append(code)
    return found


@functools.lru_cache(maxsize=8)
def _codes(text: str, filename: str, flags: int) -> tuple[types.CodeType, ...]:
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return tuple(codes_in(compile(text, filename, "exec", flags, dont_inherit=True)))


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code, and the code of all functions and classes in it, in the order of evaluation."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes_in(const)


def names_in(code: types.CodeType, *steps: str) -> Iterator[str]:
    """Yield the names in such steps of code (`LOAD_GLOBAL`), and of all code in it."""
    for inner in codes_in(code):
        for step in dis.get_instructions(inner):
            if step.opname in steps:
                yield step.argval


# ---- classes with generated methods


def _of_class(cls: Any, plain: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return how to pickle a class by value; `plain` is cloudpickle's way.

    Methods without source are left out, and the other Python generates its own.
    """
    function, args, (attributes, slots), *_, set_state = plain
    if "__dataclass_fields__" in vars(cls):
        kept = _without(_OF_DATACLASS, attributes)
        fields = {}
        kept["__annotations__"] = {}
        for name, kind in inspect.get_annotations(cls).items():
            if name in cls.__dataclass_fields__:
                fields[name] = _set(_FIELD, cls.__dataclass_fields__[name])
            if kind is not dataclasses.KW_ONLY:  # each field has this flag itself
                kept["__annotations__"][name] = kind
        params = _set(_PARAMS, cls.__dataclass_params__)
        of_dataclass = (set_state, (kept, slots), fields, params)
        return function, args, of_dataclass, None, None, _make_dataclass
    if issubclass(cls, tuple) and "_fields" in vars(cls):
        written = set(vars(_named_tuple(cls.__name__, cls._fields, None)))
        kept = _without(written - {"__doc__", "__module__"}, attributes)
        kept.pop("__orig_bases__", None)  # typing.NamedTuple, from Python 3.12 on
        args = (*args[:2], cls.__bases__, *args[3:])
        defaults = tuple(cls._field_defaults.values())
        of_tuple = (set_state, (kept, slots), cls._fields, defaults)
        return function, args, of_tuple, None, None, _make_named_tuple
    if "_is_protocol" in vars(cls):
        kept = _without(_OF_PROTOCOL, attributes)
        is_runtime = vars(cls).get("_is_runtime_protocol", False)
        of_protocol = (set_state, (kept, slots), is_runtime)
        return function, args, of_protocol, None, None, _make_protocol
    return plain


def _named_tuple(name: str, fields: Any, defaults: Any) -> Any:
    make: Any = collections.namedtuple  # noqa: PYI024 - for any fields
    return make(name, fields, defaults=defaults)


def _without(names: set[str], attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes of a class without these names, except methods that the user has written."""
    kept = {}
    for name, value in attributes.items():
        function = inspect.unwrap(value) if callable(value) else value
        code = getattr(function, "__code__", None)
        is_users = code is not None and code.co_filename not in _MADE_IN
        if name not in names or is_users:
            kept[name] = value
    return kept


def _set(names: tuple[str, ...], source: Any) -> dict[str, Any]:
    found = {}
    for name in names:
        value = getattr(source, name)
        if value is not dataclasses.MISSING:
            found[name] = dict(value) if name == "metadata" else value
    return found


def _make_dataclass(cls: Any, state: tuple[Any, ...]) -> None:
    set_state, kept, fields, params = state
    if "__dataclass_fields__" in vars(cls):
        return  # this process has the class
    slots = {name: vars(cls)[name] for name in fields if name in vars(cls)}
    set_state(cls, kept)
    for name, field in fields.items():
        setattr(cls, name, dataclasses.field(**field))
    dataclasses.dataclass(**params)(cls)
    for name, slot in slots.items():  # in whose place the fields stood
        setattr(cls, name, slot)


def _make_named_tuple(cls: Any, state: tuple[Any, ...]) -> None:
    set_state, kept, fields, defaults = state
    if "_fields" in vars(cls):
        return
    plain = _named_tuple(cls.__name__, fields, defaults)
    for name, value in vars(plain).items():
        if name not in ("__dict__", "__weakref__", "__slots__", "__module__"):
            setattr(cls, name, value)
    set_state(cls, kept)


def _make_protocol(cls: Any, state: tuple[Any, ...]) -> None:
    set_state, kept, is_runtime = state
    set_state(cls, kept)
    if "__protocol_attrs__" in vars(cls):  # from Python 3.12 on
        cls.__protocol_attrs__ = typing._get_protocol_attrs(cls)  # type: ignore[attr-defined]  # noqa: SLF001
    if is_runtime:
        typing.runtime_checkable(cls)
