"""Encodes messages as lines of JSON, and decodes them.

Decoding checks everything: for any bytes, `decode` returns a message whose fields have their types,
or raises `BadLine`. A `Decoder` with limits also enforces the limits of fields (bounds.py): the
notebook uses one for messages from hosts (distmagic/connection/limits.py).
"""

from __future__ import annotations

import base64
import json
import re
import struct
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import partial
from typing import (
    Annotated,
    Any,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from distmagic.remote.frozen import dataclass_transform, frozen

MAX_LINE_BYTES = 1 << 20
_LARGEST = 1 << 63

Message = Any  # one of the classes registered by `message`


class BadLine(ValueError):
    """A line that violates the protocol; the text describes how."""


_TYPES: dict[str, type] = {}
_NAMES: dict[type, str] = {}
_REQUESTS: set[type] = set()

_M = TypeVar("_M")


_POINT_BYTES = 24


class Numbers(tuple[float, ...]):
    """Points of three numbers, which travel as doubles in base64: writing and reading text takes
    ten times as long.
    """

    __slots__ = ()


def packed(numbers: Sequence[float]) -> str:
    """Return `Numbers` as they travel."""
    return base64.b64encode(struct.pack(f"<{len(numbers)}d", *numbers)).decode()


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))  # fmt: skip
def message(cls: type[_M]) -> type[_M]:
    """Make a class frozen, and register it under its name in snake case: `GetRoute` is
    `get_route`.
    """
    cls = frozen(cls)
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
    _TYPES[name], _NAMES[cls] = cls, name
    return cls


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))  # fmt: skip
def request(cls: type[_M]) -> type[_M]:
    """Register a class like `message`, as one that no host sends."""
    _REQUESTS.add(cls)
    return message(cls)


def name_of(message: Message) -> str:
    """Return the registered name of a message's type."""
    return _NAMES[type(message)]


def encode(message: Message, n: int = 0) -> bytes:
    """Return the line of `message`, newline included."""
    line = {"t": name_of(message), "n": n, **plain(message)}
    return json.dumps(line, separators=(",", ":"), allow_nan=True).encode() + b"\n"


def plain(value: Any) -> Any:
    """Return a message, or a part of one, as dicts and lists.

    Fields with their default value are left out.
    """
    # The most frequent case: the start of a node names all hosts.
    if isinstance(value, str):
        return value
    if is_dataclass(value):
        pairs = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: plain(v) for f, v in pairs if v != _default(f)}
    if isinstance(value, Numbers):
        return packed(value)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def _default(field: Field[Any]) -> Any:
    """Return the default of a field, MISSING where it has none."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


# A limit takes a value of its field's type, and returns one within the limit.
Limit = Callable[[Any], Any]


class Wrong(Exception):
    """A value that its field does not accept; `path` leads to the field, and is extended on the way
    up.
    """

    path = ""


_Reader = Callable[[Any], Any]


class Decoder:
    """Decodes messages, from any sender or from hosts, which send no requests and whose fields are
    limited.

    `limits` maps the word in a field's `Annotated` to a function, which makes a limit from the
    arguments after it.
    """

    def __init__(
        self, limits: Mapping[str, Callable[..., Limit]] | None = None
    ) -> None:
        self._limits = limits
        self._readers: dict[Any, _Reader] = {
            str: _text,
            int: _whole,
            float: _number,
            bool: partial(_exactly, bool),
            Numbers: _numbers,
        }

    def decode(self, line: bytes) -> tuple[int, Message | None]:
        """Return sequence number and message of a line; the message is None for an unknown type.

        Raises `BadLine` for any violation of the protocol: no JSON, a missing field, a wrong type.
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
            or not 0 <= raw["n"] < _LARGEST
        ):
            raise BadLine(f"not a message: {line[:80]!r}")
        kind = _TYPES.get(raw["t"])
        if kind in _REQUESTS and self._limits is not None:
            raise BadLine(f"{raw['t']}: no host sends this")
        try:
            return raw["n"], None if kind is None else self._reader(kind)(raw)
        except Wrong as wrong:
            raise BadLine(f"{raw['t']}{wrong.path}: {wrong}") from None

    def prepare(self, *kinds: type) -> None:
        """Do in advance what else the first message of each of these types would need."""
        for kind in kinds:
            self._reader(kind)

    def from_plain(self, kind: type[_M], value: Any) -> _M:
        """Return the object of class `kind` with the plain form `value`.

        Raises `BadLine` for an invalid value.
        """
        try:
            return cast(_M, self._reader(kind)(value))
        except Wrong as wrong:
            raise BadLine(f"{kind.__name__}{wrong.path}: {wrong}") from None

    def _reader(self, kind: Any) -> _Reader:
        """Return a function that checks a plain value and converts it to a `kind`."""
        if kind not in self._readers:
            self._readers[kind] = self._make_reader(kind)
        return self._readers[kind]

    def _make_reader(self, kind: Any) -> _Reader:
        origin, args = get_origin(kind), get_args(kind)
        if is_dataclass(kind):
            return self._dataclass_reader(cast(type, kind))
        inner = self._reader(args[0])
        if origin is Annotated:
            if self._limits is None:
                return inner
            limit = self._limits[args[1]](*args[2:])
            return lambda value: limit(inner(value))
        if origin is tuple:
            return partial(_read_list, inner)
        if origin is dict:
            return partial(_read_dict, inner, self._reader(args[1]))
        if origin in (types.UnionType, Union):
            return lambda value: None if value is None else inner(value)
        raise TypeError(f"no field of a message may be a {kind}")

    def _dataclass_reader(self, kind: type) -> _Reader:
        hints = get_type_hints(kind, include_extras=True)
        readers = []
        for one in fields(kind):
            reader = self._reader(hints[one.name])
            readers.append((one.name, reader, _default(one) is MISSING))

        def read(value: Any) -> Any:
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


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise Wrong(f"{type(value).__name__} instead of {kind.__name__}")
    return value


def _text(value: Any) -> str:
    text: str = _exactly(str, value)
    # No lone surrogates.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _whole(value: Any) -> int:
    if not -_LARGEST <= _exactly(int, value) <= _LARGEST:
        raise Wrong("too large a number")
    return int(value)


def _number(value: Any) -> float:
    if type(value) is not int:
        return float(_exactly(float, value))
    try:
        return float(value)
    except OverflowError:
        raise Wrong("too large a number") from None


def _numbers(value: Any) -> Numbers:
    try:
        data = base64.b64decode(_text(value), validate=True)
    except ValueError:
        raise Wrong("no base64") from None
    if not data or len(data) % _POINT_BYTES:
        raise Wrong("a part of a point")
    return Numbers(struct.unpack(f"<{len(data) // 8}d", data))


def _read_list(item: _Reader, value: Any) -> Any:
    if not isinstance(value, list):
        raise Wrong("no list")
    return tuple(map(item, value))


def _read_dict(name: _Reader, item: _Reader, value: Any) -> Any:
    if not isinstance(value, dict):
        raise Wrong("no object")
    return {name(k): item(v) for k, v in value.items()}


_ANYBODY = Decoder()
decode = _ANYBODY.decode
from_plain = _ANYBODY.from_plain
prepare = _ANYBODY.prepare
