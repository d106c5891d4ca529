"""Writes messages as lines of JSON, and reads them again.

Reading checks everything: whatever bytes come, `decode` returns a message whose fields have their types, or raises
`BadLine`. A `Decoder` with limits bounds each field, too: the notebook has one for what hosts send
(distmagic/connection/limits.py).
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass

MAX_LINE_BYTES = 1 << 20
_LARGEST = 1 << 63

Message = typing.Any  # one of the classes that are entered by `message`


class BadLine(ValueError):
    """A line that is not of this protocol; the text says what is wrong with it."""


_TYPES: dict[str, type] = {}
_NAMES: dict[type, str] = {}

_M = typing.TypeVar("_M")


def message(cls: type[_M]) -> type[_M]:
    """Enter a class among the types of the wire, under its name in snake case: `GetRoute` is `get_route`."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
    _TYPES[name], _NAMES[cls] = cls, name
    return cls


def name_of(message: Message) -> str:
    """Return the name that the type of a message has on the wire."""
    return _NAMES[type(message)]


def encode(message: Message, n: int = 0) -> bytes:
    """Return the line of `message`, newline included."""
    line = {"t": name_of(message), "n": n, **plain(message)}
    return json.dumps(line, separators=(",", ":"), allow_nan=True).encode() + b"\n"


def plain(value: typing.Any) -> typing.Any:
    """Return a message, or a part of one, as dicts and lists. Fields that are at their default are left out."""
    # As most of what is encoded: the start of a node names all hosts.
    if isinstance(value, str):
        return value
    if is_dataclass(value):
        pairs = ((f, getattr(value, f.name)) for f in fields(value))
        return {
            f.name: plain(v) for f, v in pairs if f.default is MISSING or v != f.default
        }
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


# A limit gets a value that has its field's type. It returns one that is within the limit, or raises `Wrong`.
Limit = Callable[[typing.Any], typing.Any]


class Wrong(Exception):
    """A value that is not what its field wants; `path` leads to the field, and grows on the way out."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.path = what, ""


_Reader = Callable[[typing.Any], typing.Any]


class Decoder:
    """Reads messages, from anybody or from those whom `limits` are for.

    `limits` has a function for each bounded field, by type and name. A type that is not in it is refused.
    """

    def __init__(
        self, limits: Mapping[type, Mapping[str, Limit]] | None = None
    ) -> None:
        self._limits = limits
        self._readers: dict[typing.Any, _Reader] = {
            str: _text,
            int: _whole,
            float: _number,
            bool: _yes_or_no,
        }

    def decode(self, line: bytes) -> tuple[int, Message | None]:
        """Return sequence number and message of a line; None for a type that this half does not know.

        Raises `BadLine` for anything that is not of the protocol: no JSON, a missing field, a wrong type.
        """
        if len(line) > MAX_LINE_BYTES:
            raise BadLine(
                f"a line of {len(line)} bytes (at most {MAX_LINE_BYTES} are allowed)"
            )
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadLine(f"not JSON: {line[:80]!r}") from error
        if (
            not isinstance(raw, dict)
            or not isinstance(raw.get("t"), str)
            or type(raw.get("n")) is not int
        ):
            raise BadLine(f"not a message: {line[:80]!r}")
        if not 0 <= raw["n"] <= _LARGEST:
            raise BadLine(f"not a message: {line[:80]!r}")
        kind = _TYPES.get(raw["t"])
        try:
            return raw["n"], None if kind is None else self._reader(kind)(raw)
        except Wrong as wrong:
            raise BadLine(f"{raw['t']}{wrong.path}: {wrong.what}") from None

    def from_plain(self, kind: type[_M], value: typing.Any) -> _M:
        """Return the `kind` of which `value` is the plain form. Raises `BadLine` where it isn't."""
        try:
            return typing.cast(_M, self._reader(kind)(value))
        except Wrong as wrong:
            raise BadLine(f"{kind.__name__}{wrong.path}: {wrong.what}") from None

    def _reader(self, kind: typing.Any) -> _Reader:
        """Return a function that checks a plain value and makes a `kind` of it."""
        if kind not in self._readers:
            self._readers[kind] = self._make_reader(kind)
        return self._readers[kind]

    def _make_reader(self, kind: typing.Any) -> _Reader:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if is_dataclass(kind):
            return self._dataclass_reader(typing.cast(type, kind))
        if origin is tuple:
            return _list_reader(self._reader(args[0]))
        if origin is dict:
            return _metrics if args[1] is float else _dict_reader(self._reader(args[1]))
        if origin in (types.UnionType, typing.Union):
            inner = self._reader(args[0])
            return lambda value: None if value is None else inner(value)
        raise TypeError(f"no field of a message may be a {kind}")

    def _field_reader(self, kind: typing.Any, limit: Limit | None) -> _Reader:
        if limit is None:
            return self._reader(kind)
        is_optional = typing.get_origin(kind) in (types.UnionType, typing.Union)
        inner = typing.get_args(kind)[0] if is_optional else kind
        read = self._reader(inner)
        # Most values are numbers; one of this type needs no `read`.
        checked = float if inner is float else None

        def read_within(value: typing.Any) -> typing.Any:
            if type(value) is checked:
                return limit(value)
            if value is None and is_optional:
                return None
            return limit(read(value))

        return read_within

    def _dataclass_reader(self, kind: type) -> _Reader:
        if self._limits is not None and kind not in self._limits:
            raise Wrong("no host sends this")
        limits = self._limits[kind] if self._limits is not None else {}
        hints = typing.get_type_hints(kind)
        readers = []
        for field in fields(kind):
            reader = self._field_reader(hints[field.name], limits.get(field.name))
            readers.append((field.name, reader, field.default is MISSING))

        def read(value: typing.Any) -> typing.Any:
            if not isinstance(value, dict):
                raise Wrong("no object")
            found = {}
            for name, reader, required in readers:
                if name in value:
                    try:
                        found[name] = reader(value[name])
                    except Wrong as wrong:
                        wrong.path = f".{name}{wrong.path}"
                        raise
                elif required:
                    raise Wrong(f"{name} is missing")
            return kind(**found)

        return read


def _text(value: typing.Any) -> str:
    if type(value) is not str:
        raise Wrong(f"{type(value).__name__} in place of str")
    # No lone surrogates.
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _whole(value: typing.Any) -> int:
    if type(value) is not int:
        raise Wrong(f"{type(value).__name__} in place of int")
    if not -_LARGEST <= value <= _LARGEST:
        raise Wrong("too large a number")
    return value


def _number(value: typing.Any) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise Wrong(f"{type(value).__name__} in place of float")
    try:
        return float(value)
    except OverflowError:
        raise Wrong("too large a number") from None


def _yes_or_no(value: typing.Any) -> bool:
    if type(value) is not bool:
        raise Wrong(f"{type(value).__name__} in place of bool")
    return value


def _list_reader(item: _Reader) -> _Reader:
    def read(value: typing.Any) -> typing.Any:
        if not isinstance(value, list):
            raise Wrong("no list")
        return tuple(map(item, value))

    return read


def _dict_reader(item: _Reader) -> _Reader:
    def read(value: typing.Any) -> typing.Any:
        if not isinstance(value, dict):
            raise Wrong("no object")
        return {_text(k): item(v) for k, v in value.items()}

    return read


def _metrics(value: typing.Any) -> dict[str, float]:
    """Read a table of numbers. Most of what comes are metrics, so this spares a call for each name and number."""
    if not isinstance(value, dict):
        raise Wrong("no object")
    return {
        k if k.isascii() else _text(k): v if type(v) is float else _number(v)
        for k, v in value.items()
    }


_ANYBODY = Decoder()
decode = _ANYBODY.decode
from_plain = _ANYBODY.from_plain
