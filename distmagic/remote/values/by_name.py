"""Sends names of the notebook that the call's code does not use directly, for code that looks up
names as text.

`globals()["Large"]`, `eval`, string annotations, `Base.__subclasses__()` and a pickle in a file
need functions, classes, modules and constants that no code names. Each of them is pickled and sent
separately, if it is small. A tensor, a model or any other object is only sent if code names it.

On a rank, those that strings in the call's code name are loaded at once. So are those that need
only the call's modules and Python's own. The others are loaded when they are looked up in
`__main__`, because their modules may take seconds to import.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType, UnionType
from typing import Any

from distmagic.remote.values import unpicklable
from distmagic.remote.values.seen import Seen

MAX_BYTES = 64 << 10  # for each, pickled
MAX_ALL_BYTES = 1 << 20  # newest first
_EVERYWHERE = ("__main__", "builtins", "cloudpickle", "distmagic")
_MAX_ITEMS = 1_000  # of a constant
_WORD = re.compile(r"[^\W\d]\w*")
_QUOTED = re.compile(r"ForwardRef\('(.*?)'")
_SECRET = re.compile(
    r"(^|_)(SECRET|TOKEN|CREDENTIAL|CRED|KEY|PAT|AUTH|PW|DSN)S?($|_)"
    # also PGPASSWORD and SSHPASS
    r"|(SECRET|TOKEN|PASSWORD|PASSWD|(^|_|SSH)PASS|PWD|AUTHORIZATION|BEARER|COOKIE)S?($|_)"
    r"|(SECRET|ACCESS|PRIVATE|API|AWS|OPENAI)_?KEY|PASSPHRASE",
    re.IGNORECASE,
)
_SECRET_TEXT = re.compile(
    r"://[^/\s]*:[^/\s]*@|\b(Bearer|Basic) \S|PRIVATE KEY-----"
    r"|\b(sk-|hf_|gh[pousr]_|github_pat_|xox[abp]-|AKIA|eyJ)\w{8}"
    r"|(password|passwd|secret|token)\W{1,4}\w",
    re.IGNORECASE,
)
_OF_IPYTHON = ("In", "Out", "exit", "get_ipython", "open", "quit")


@dataclass(frozen=True)
class Aside:
    """One such value: its pickle, and whether it is loaded at once."""

    pickled: bytes
    is_at_once: bool


def asides(
    found: Mapping[str, tuple[bytes, Seen]],
    namespace: Mapping[str, object],
    call: Seen,
) -> dict[str, Aside]:
    """Return the values of `namespace` that were `found` small, each with its pickle and notes.

    Those that string annotations of the call name are added to the notes about the call.
    """
    annotated: set[str] = set()
    while waiting := call.annotated & found.keys() - annotated:
        annotated |= waiting
        for _, seen in map(found.__getitem__, waiting):
            call.codes += seen.codes
            call.modules |= seen.modules
            call.annotated |= seen.annotated
    named = _in_strings(call.codes)
    here = _tops([*call.modules, *sys.stdlib_module_names, *_EVERYWHERE])
    for code in call.codes:
        here |= _tops(code.co_names)
    chosen = {}
    for name, (pickled, seen) in found.items():
        is_module = isinstance(namespace[name], ModuleType)
        is_at_once = (
            _tops(seen.modules) <= here
            or name in annotated
            or (name in named and not is_module)
        )
        chosen[name] = Aside(pickled, is_at_once)
    return chosen


def is_secret(name: str) -> bool:
    """Whether a variable's name suggests that its value is a secret: WANDB_API_KEY, HF_TOKEN,
    DB_PASSWORD.
    """
    return _SECRET.search(name) is not None


def is_offered(name: str, value: object) -> bool:
    """Whether a rank may look up a value by its name: a function, class, module, type or constant,
    but no secret.
    """
    is_own = getattr(value, "__module__", None) == "__main__"
    # IPython also defines `_3` and `_i3`; `In` has the text of all cells.
    is_of_ipython = name.startswith("_") or name in _OF_IPYTHON
    if is_of_ipython and not is_own:
        return False
    return _is_light(name, value) and not (is_own and _has_secret(value))


def _has_secret(value: object) -> bool:
    """Whether a class has a secret among its attributes, or a function among its defaults and
    closure.
    """
    parts: Iterable[tuple[str, object]] = ()
    if isinstance(value, type):
        parts = vars(value).items()
    if isinstance(value, FunctionType):
        parts = unpicklable.enclosed(value)
    return any(
        isinstance(part, str | bytes) and not _is_constant(part, name)
        for name, part in parts
        if not name.startswith("__")
    )


def _is_light(name: str, value: object) -> bool:
    return (
        isinstance(getattr(value, "__name__", None), str)
        or isinstance(value, UnionType)
        or _is_constant(value, name)
    )


def _is_constant(value: object, name: str) -> bool:
    if isinstance(value, str | bytes):
        text = value if isinstance(value, str) else value.decode("latin-1")
        return not is_secret(name) and not _SECRET_TEXT.search(text)
    if isinstance(value, dict | list | tuple | set) and len(value) > _MAX_ITEMS:
        return False
    if type(value) is dict:
        return all(
            _is_constant(key, "") and _is_constant(item, str(key))
            for key, item in value.items()
        )
    if type(value) in (list, tuple, set):
        items: Any = value
        return all(_is_constant(item, name) for item in items)
    return value is None or isinstance(value, int | float | complex)


def in_annotations(annotations: Iterable[object]) -> set[str]:
    """Return all words that may be names in annotations that are or contain strings:
    `List["Net"]`.
    """
    texts = []
    for annotation in annotations:
        if isinstance(annotation, str):
            texts.append(annotation)
        else:
            texts += _QUOTED.findall(repr(annotation))
    return set(_WORD.findall(" ".join(texts)))


def _in_strings(codes: Iterable[CodeType]) -> set[str]:
    """Return all words that may be names in strings of code, except in sentences."""
    found = set()
    for code in codes:
        for const in code.co_consts:
            if isinstance(const, str) and len(const.split()) == 1:
                found.update(_WORD.findall(const))
    return found


def _tops(names: Iterable[str]) -> set[str]:
    """Return the top-level packages of modules."""
    return {name.partition(".")[0] for name in names}


class Small(io.BytesIO):
    """A buffer for a pickle of at most `MAX_BYTES`."""

    def write(self, data: Any) -> int:
        """Raise `pickle.PicklingError` for more."""
        if self.tell() + len(data) > MAX_BYTES:
            raise pickle.PicklingError("too large to travel just for its name")
        return super().write(data)


def with_fewer_globals(reduced: Any, only: Container[str] | None) -> Any:
    """Return how to pickle a function, as `reduced` does, but with `only` these of its globals;
    None: all but objects.
    """
    state, slots = reduced[2]
    kept = {}
    for name, value in slots["__globals__"].items():
        if _is_light(name, value) if only is None else name in only:
            kept[name] = value
    return (*reduced[:2], (state, slots | {"__globals__": kept}), *reduced[3:])


def offer(
    asides: Mapping[str, Aside],
    namespace: dict[str, Any],
    load: Callable[[io.BytesIO], object],
) -> None:
    """Load the values into `namespace`, the `__dict__` of `__main__`: some at once, the others when
    looked up.
    """

    def find(name: str) -> object:
        if name not in asides:
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        before = dict(namespace)
        try:
            found = load(io.BytesIO(asides[name].pickled))
        except Exception as error:
            raise AttributeError(
                f"module '__main__' has no attribute {name!r}: the notebook's can't be loaded on this host "
                f"({type(error).__name__}: {error})"
            ) from error
        # Loaded functions bring their globals: existing names stay unchanged.
        namespace.update(before)
        return namespace.setdefault(name, found)

    for name, aside in asides.items():
        if aside.is_at_once and name not in namespace:
            with suppress(AttributeError):
                find(name)
    namespace.setdefault("__getattr__", find)
