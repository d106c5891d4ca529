"""Which of the values that came with a call it has changed on its rank: the notebook's own ones stay as they were.

marks    --of the names of `__main__`, before the call-->   what their values are like
changed  --after it, with those marks-->                    names
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

_MOST = 20_000  # values that are looked at
_DEEP = 4  # lists in dicts in objects
_CORNER = 8  # numbers of a tensor or an array that are looked at, in each dimension
_CONTAINERS = (list, tuple, set, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_PLAIN = (int, float, str, bool, bytes, complex, type(None))
_NAMED_AT_MOST = 5


def marks(names: Mapping[str, object]) -> dict[str, object]:
    """Return a mark of each name's value, by which a later change is noticed. Never raises."""
    room = iter(range(_MOST))
    found = {}
    for name, value in names.items():
        if not name.startswith("_"):
            try:
                found[name] = _mark(value, room, _DEEP)
            except Exception:  # noqa: BLE001 - an object of the user's, which may raise anything
                found[name] = id(value)
    return found


def changed(
    names: Mapping[str, object], before: Mapping[str, object], result: object
) -> str:
    """Return in words which names have other values than `before`; "" for none, or for those that the call returns.

    A call that returns tensors, or a dict, may have returned what it has trained: then only other values count. It never
    raises.
    """
    try:
        returned = list(_all_parts(result, iter(range(_MOST)), _DEEP))
        kept = set(map(id, returned))
        has_trained = type(result) is dict or any(map(_is_of_torch, returned))
        after = marks({name: names[name] for name in before if name in names})
        found = []
        for name, mark in sorted(after.items(), key=lambda pair: pair[0]):
            is_trained = has_trained and _is_of_torch(names[name])
            is_kept = id(names[name]) in kept or is_trained
            if not is_kept and _differs(before[name], mark):
                found.append(name)
        if len(found) > _NAMED_AT_MOST:
            found[_NAMED_AT_MOST:] = ["..."]
        return ", ".join(found)
    except Exception:  # noqa: BLE001 - an object of the user's, which may raise anything
        return ""


def _differs(before: object, after: object) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):
        # An object may keep what it has computed or opened: what was None, or not there, says nothing.
        same = [key for key in before if before[key] is not None and key in after]
        return any(_differs(before[key], after[key]) for key in same)
    if isinstance(before, list) and isinstance(after, list):
        parts = zip(before, after, strict=False)
        return len(before) != len(after) or any(_differs(*pair) for pair in parts)
    return before != after


def _mark(
    value: Any, room: Iterator[int], deep: int, *, inside: bool = False
) -> object:
    """Return what a value is like: a list for a container, a dict for an object and what is inside of it, else a text."""
    if isinstance(value, _PLAIN):
        return repr(value) if isinstance(value, float | complex) else value  # NaN
    if not deep or next(room, None) is None or isinstance(value, type):
        return id(value)
    if type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
        value, inside = dict(vars(value)), True
    if type(value) in _MAPPINGS and inside:
        pairs = islice(value.items(), _MOST)
        return {
            repr(key): _mark(one, room, deep - 1, inside=True) for key, one in pairs
        }
    parts = _parts(value)
    if parts is not None:
        marked: list[object] = [len(value)]
        for part in parts:
            marked.append(_mark(part, room, deep - 1, inside=inside))
        return marked
    if _is_of_torch(value) and not hasattr(value, "layout"):
        return [_numbers(one) for one in (*value.parameters(), *value.buffers())]
    return _numbers(value)


def _parts(value: Any) -> Iterator[object] | None:
    """Return what is in a container, of a long one the beginning; None for anything else."""
    if type(value) in _MAPPINGS:
        return islice(chain.from_iterable(value.items()), _MOST)
    return islice(value, _MOST) if type(value) in _CONTAINERS else None


def _all_parts(value: Any, room: Iterator[int], deep: int) -> Iterator[object]:
    """Yield a value and what is in it."""
    yield value
    parts = _parts(value)
    if parts is None and type(value).__module__ == "__main__":
        parts = iter(list(getattr(value, "__dict__", {}).values()))
    for part in parts or ():
        if deep and next(room, None) is not None:
            yield from _all_parts(part, room, deep - 1)


def _numbers(value: Any) -> object:
    """Return what a tensor or an array is like, by some of its numbers; of anything else only which object it is.

    Nothing large is copied for that. On another device, and with another precision, they are the same.
    """
    if _is_of_torch(value):
        if hasattr(value, "to_local"):
            value = value.to_local()  # of a sharded one: no collective
        corner = (slice(0, _CORNER),) * value.dim()
        return repr(value.detach()[corner].cpu().tolist())
    if type(value).__module__ == "numpy" and hasattr(value, "flat"):
        return [value.shape, value.flat[: _CORNER**2].tobytes()]
    return id(value)


def _is_of_torch(value: object) -> bool:
    """Whether the value is a tensor or a module of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.Tensor | torch.nn.Module)
