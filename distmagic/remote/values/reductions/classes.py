"""Classes that travel by value: adds what cloudpickle leaves out of them, and keeps the classes
that a process has.

A result's copy of a class has other globals and a rank's values, so the notebook's own class stays
as it is.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_MAKING = ("_make_skeleton_class", "_make_skeleton_enum")
_FILLING = ("_class_setstate", "_fill_enum")
# Attributes that each new class gets anyway.
_MADE = ("__module__", "__annotate_func__")


def add_left_out(cls: Any, plain: Any) -> None:
    """Add what cloudpickle leaves out: slots, the qualified name, and attributes that are the same
    object as that of a base.

    Without slots, objects of the class have a `__dict__`, which the notebook's objects lack.
    Without its name, pickle can't find a class inside another one.
    Without the attributes, `forward = Mixin.forward` in `class Net(Base, Mixin)` is lost, and
    `Net.forward` is that of `Base`. `plain` is cloudpickle's way to pickle the class.
    """
    make = plain[0].__name__
    if make not in _MAKING:
        return
    is_enum = make == "_make_skeleton_enum"
    # A named tuple has empty ones, and refuses to be given any.
    if not is_enum and "__slots__" in vars(cls) and not issubclass(cls, tuple):
        plain[1][3]["__slots__"] = cls.__slots__
    attributes = plain[2][0]
    if not is_enum and cls.__qualname__ != cls.__name__:
        attributes["__qualname__"] = cls.__qualname__
    for name, value in vars(cls).items():
        is_of_base = any(
            name in vars(base) and vars(base)[name] is value for base in cls.__bases__
        )
        # Python's own `enum` gives some to each enumeration.
        is_sunder = name.startswith("_") and not name.startswith("__")
        is_of_enum = is_sunder or getattr(value, "__module__", None) == "enum"
        is_made = name in _MADE or (is_enum and is_of_enum)
        if is_of_base and not is_made:
            attributes[name] = value


def whole(cls: Any, plain: Any) -> Any:
    """Return how to pickle an enumeration with its second names and attributes of members, or a
    TypedDict that derives from another one; any other class as before.
    """
    function, args, *rest = plain
    # Its only base is dict, from which Python makes no TypedDict.
    if typing.is_typeddict(cls) and tuple(args[2]) == (dict,):
        return function, (*args[:2], (typing.TypedDict,), *args[3:]), *rest
    if function.__name__ != "_make_skeleton_enum":
        return plain
    state, *_, fill = rest
    own = {}
    args[3].clear()
    for alias, member in cls.__members__.items():
        args[3][alias] = member.value
        state[0].pop(alias, None)
        for name, value in vars(member).items():
            if not name.startswith("_") or not name.endswith("_"):
                own[alias, name] = value
    metaclass = None if type(cls) is enum.EnumMeta else type(cls)
    return function, args, (fill, state, own, metaclass), None, None, _fill_enum


def _fill_enum(cls: Any, state: Any) -> None:
    """Give an enumeration its metaclass, None for the usual one, and attributes; and members what
    `__init__` has set.
    """
    fill, kept, own, metaclass = state
    if metaclass is not None:
        cls.__class__ = metaclass
    fill(cls, kept)
    for (member, name), value in own.items():
        vars(cls[member])[name] = value


# ---- when it is loaded


def when_loaded(name: str, found: Any, kept: frozenset[type]) -> Any:
    """Return the function to call instead of `found`, which a pickle names; the classes `kept` stay
    as they are.
    """
    if name in _FILLING:
        return functools.partial(_fill, found, kept)
    return functools.partial(_made, found) if name in _MAKING else found


def _made(make: Callable[..., Any], *args: Any) -> Any:
    """Return the class that has this tracker id, or make it.

    cloudpickle makes a second one and drops it. But an `__init_subclass__` would put it into a
    registry.
    """
    trackers: Any = sys.modules["cloudpickle.cloudpickle"]
    known = trackers._DYNAMIC_CLASS_TRACKER_BY_ID.get(args[-2])  # noqa: SLF001
    if known is not None:
        return known
    if make.__name__ != "_make_skeleton_class":
        return make(*args)
    metaclass, name, bases, *more = args
    # `__new__` and `__init__` of a metaclass of a cell may use attributes that the class has not
    # got yet.
    known = next(one for one in metaclass.__mro__ if one.__module__ != "__main__")
    if known is not metaclass:
        metaclass = functools.partial(known.__new__, metaclass)
    with _without_hooks(bases):
        return make(metaclass, name, bases, *more)


@contextlib.contextmanager
def _without_hooks(bases: tuple[type, ...]) -> Iterator[None]:
    """Hide the `__init_subclass__` of classes of a cell in the block, for the same reason."""
    hidden = {}
    for one in (inner for base in bases for inner in getattr(base, "__mro__", ())):
        if one.__module__ == "__main__" and "__init_subclass__" in vars(one):
            hidden[one] = vars(one)["__init_subclass__"]
    for one in hidden:
        type.__delattr__(one, "__init_subclass__")
    try:
        yield
    finally:
        for one, hook in hidden.items():
            type.__setattr__(one, "__init_subclass__", hook)


def _fill(
    fill: Callable[..., Any], kept: frozenset[type], cls: type, state: object
) -> Any:
    """Give a class the attributes of its pickled copy, unless it is to stay as it is."""
    return cls if cls in kept else fill(cls, state)


def hashed(names: Mapping[str, object]) -> list[Any]:
    """Return the dicts and sets whose first key is an object of a cell's class that has a
    `__hash__`.

    They are values of names and attributes of such classes.
    """
    kinds = [one for one in known_classes() if "__hash__" in vars(one)]
    values: list[Any] = [*names.values()]
    values += [v for one in kinds for v in vars(one).values()]
    return [
        one
        for one in values
        if type(one) in (dict, set) and type(next(iter(one), None)) in kinds
    ]


def hash_again(names: Mapping[str, object], before: Sequence[object]) -> None:
    """Build dicts and sets below these names again, except those in `before`.

    They may have been built before the `__hash__` of their keys was known.
    """
    kept = {id(one) for one in before}
    for found in hashed(names):
        if id(found) not in kept:
            # `__hash__` and `__eq__` are the user's.
            with contextlib.suppress(Exception):
                items = found.items() if type(found) is dict else [*found]
                again = type(found)(items)
                found.clear()
                found.update(again)


def known_classes() -> frozenset[type]:
    """Return the classes that this process has pickled or loaded by value."""
    module = sys.modules.get("cloudpickle.cloudpickle")
    # TypeVars are among them.
    known = getattr(module, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", ())
    return frozenset(one for one in known if isinstance(one, type))
