"""Notes whether this rank was in a process group, and used it: ranks that were in none have each worked alone.

A process group counts its operations: gloo all of them, NCCL its collectives. That count is gone with the group. So the
functions of torch that end groups are replaced by ones that look at the groups first; those that are left at the end of
the rank are looked at then. torch is not imported for that: until the user's code does, nothing is replaced.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from distmagic.remote.wire.vocabulary import GroupUse

_C10D = "torch.distributed.distributed_c10d"
_ENDING = ("destroy_process_group", "_abort_process_group")


class _Hook(importlib.abc.MetaPathFinder):
    """Replaces functions of torch.distributed when that is imported, and remembers the use of groups that have ended."""

    use: GroupUse = "none"

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for that one module, None for all others."""
        if name != _C10D:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


class _PatchingLoader(importlib.abc.Loader):
    """Loads the module as before, then replaces functions in it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source and the like, for tracebacks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _patch(module)


_hook = _Hook()


def install() -> None:
    """Begin to take notes in this process."""
    sys.meta_path.insert(0, _hook)
    if _C10D in sys.modules:
        _patch(sys.modules[_C10D])


def use() -> GroupUse:
    """Return what became of this rank's process groups: whether there was one, and whether it was used."""
    _look(sys.modules.get(_C10D))
    return _hook.use


def _patch(c10d: ModuleType) -> None:
    package = sys.modules.get("torch.distributed")  # it has the functions under the same names
    for name in _ENDING:
        original = getattr(c10d, name, None)
        if original is None:
            continue
        ending = _looking_first(original, c10d)
        for module in (c10d, package):
            if getattr(module, name, None) is original:
                setattr(module, name, ending)


def _looking_first(original: Callable[..., Any], c10d: ModuleType) -> Callable[..., Any]:
    @functools.wraps(original)
    def ending(*args: Any, **kwargs: Any) -> Any:
        _look(c10d)
        return original(*args, **kwargs)

    return ending


def _look(c10d: Any) -> None:
    """Take a note of the process groups that there are now."""
    if c10d is None or _hook.use == "used":
        return
    try:
        groups = list(c10d._world.pg_map)  # noqa: SLF001
        if groups:
            _hook.use = "used" if any(map(_has_been_used, groups)) else "unused"
    except Exception:  # noqa: BLE001 - of a torch that keeps its groups elsewhere nothing is known
        _hook.use = "used"


def _has_been_used(group: Any) -> bool:
    """Whether a group of several ranks has done anything. Raises RuntimeError for a backend that does not count."""
    if group.size() < 2:
        return False
    counts = []
    for device in group._device_types:  # noqa: SLF001
        counts.append(group._get_backend(device)._get_sequence_number_for_group())  # noqa: SLF001, PERF401
    return any(counts)
