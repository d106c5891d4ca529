"""Which of the values that came with a call it has changed on its rank: the notebook's own ones stay as they were.

marks    --of the names of `__main__`, before the call-->   what their values are like
changed  --after it, with those marks-->                    names
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

_MOST = 20_000  # values that are looked at
_DEEP = 4  # lists in dicts in objects
_SAMPLE = 64  # numbers of a tensor or an array
_CONTAINERS = (list, tuple, set, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_PLAIN = (int, float, str, bool, bytes, complex, type(None))
_NAMED_AT_MOST = 5


def marks(names: Mapping[str, object]) -> dict[str, object]:
    """Return what the values of these names are like now. It never raises."""
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

    A call that returns anything may have returned what it has trained: then only other values count.
    """
    parts: Any = result.values() if type(result) is dict else result
    kept = {id(result)}
    if type(result) in (dict, list, tuple):
        kept.update(map(id, parts))
    after = marks({name: names[name] for name in before if name in names})
    found = []
    for name in sorted(after):
        is_kept = result is not None and _is_of_torch(names[name])
        if after[name] != before[name] and not is_kept and id(names[name]) not in kept:
            found.append(name)
    if len(found) > _NAMED_AT_MOST:
        found[_NAMED_AT_MOST:] = ["..."]
    return ", ".join(found)


def _mark(value: Any, room: Iterator[int], deep: int) -> object:
    if isinstance(value, _PLAIN):
        return value
    if not deep or next(room, None) is None:
        return id(value)
    if type(value) in _MAPPINGS:
        value = [part for pair in value.items() for part in pair]
    if type(value) in _CONTAINERS:
        parts = value if len(value) <= _MOST else ()
        return [len(value), *(_mark(part, room, deep - 1) for part in parts)]
    if type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
        return [id(value), _mark(vars(value), room, deep - 1)]
    if _is_of_torch(value) and not hasattr(value, "layout"):
        numbers = [*value.parameters(), *value.buffers()]
        return [_numbers(one) for one in numbers]
    return _numbers(value)


def _numbers(value: Any) -> object:
    """Return what a tensor or an array is like, by its first numbers; of anything else only which object it is.

    Nothing large is copied for that.
    """
    if _is_of_torch(value):
        is_here = value.device.type == "cpu" and value.is_contiguous()
        sample = value.detach().flatten()[:_SAMPLE].tolist() if is_here else ()
        return [value._version, value.data_ptr() if is_here else 0, repr(sample)]  # noqa: SLF001
    if type(value).__module__ == "numpy" and hasattr(value, "flat"):
        return [value.shape, value.flat[:_SAMPLE].tobytes()]
    return id(value)


def _is_of_torch(value: object) -> bool:
    """Whether it is a tensor or a module."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.Tensor | torch.nn.Module)
