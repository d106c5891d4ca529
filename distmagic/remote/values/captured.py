"""Finds values that a call has changed on its rank, in order to warn: the notebook's own values are
unchanged.

marks    --of the names of `__main__`, before the call-->   a mark of each value
changed  --after it, with those marks-->                    names
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

_MOST = 20_000  # limit for values that are compared
_DEEP = 4  # lists in dicts in objects
_CORNER = 8  # numbers of a tensor or array that are compared, in each dimension
_CONTAINERS = (list, tuple, set, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_PLAIN = (int, float, str, bool, bytes, complex, type(None))
_NAMED_AT_MOST = 5


def marks(names: Mapping[str, object]) -> dict[str, object]:
    """Return a mark of each name's value, to detect later changes. Never raises."""
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
    """Return in words which names have changed since `before`; "" for none, or if the call returns
    them.

    A call that returns tensors, or a dict, may have returned what it has trained: then only other
    values count. Never raises.
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
        # An object may store computed or opened values: a value that was None or missing does not
        # count.
        same = [key for key in before if before[key] is not None and key in after]
        return any(_differs(before[key], after[key]) for key in same)
    if isinstance(before, list) and isinstance(after, list):
        parts = zip(before, after, strict=False)
        return len(before) != len(after) or any(_differs(*pair) for pair in parts)
    return before != after


def _mark(
    value: Any, room: Iterator[int], deep: int, *, inside: bool = False
) -> object:
    """Return a mark of a value: a list for a container, a dict for an object and its attributes,
    else a text.
    """
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
    """Return the content of a container, only the start of a long one; None for anything else."""
    if type(value) in _MAPPINGS:
        return islice(chain.from_iterable(value.items()), _MOST)
    return islice(value, _MOST) if type(value) in _CONTAINERS else None


def _all_parts(value: Any, room: Iterator[int], deep: int) -> Iterator[object]:
    """Yield a value and everything in it."""
    yield value
    parts = _parts(value)
    if parts is None and type(value).__module__ == "__main__":
        parts = iter(list(getattr(value, "__dict__", {}).values()))
    for part in parts or ():
        if deep and next(room, None) is not None:
            yield from _all_parts(part, room, deep - 1)


def _numbers(value: Any) -> object:
    """Return a mark of a tensor or an array from some of its numbers; for anything else only its
    identity.

    Nothing large is copied. The mark does not depend on device and precision.
    """
    if _is_of_torch(value):
        if hasattr(value, "to_local"):
            value = value.to_local()  # of a sharded one, without a collective call
        corner = (slice(0, _CORNER),) * value.dim()
        return repr(value.detach()[corner].cpu().tolist())
    if type(value).__module__ == "numpy" and hasattr(value, "flat"):
        return [value.shape, value.flat[: _CORNER**2].tobytes()]
    return id(value)


def _is_of_torch(value: object) -> bool:
    """Whether the value is a tensor or a module of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.Tensor | torch.nn.Module)
