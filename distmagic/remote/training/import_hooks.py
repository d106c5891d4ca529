"""Patches a module of a library when the user's code imports it: a rank that does not use it loses
no time.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Patch = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of its table as before, and patches them when they are loaded."""

    patches: dict[str, Patch]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a module of the table, None for all others."""
        if name not in self.patches:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            ours: Any = _PatchingLoader(spec.loader, self.patches[name])
            spec.loader = ours
        return spec


class _PatchingLoader:
    """The loader of a module, which also patches it."""

    def __init__(self, loader: Any, patch: Patch) -> None:
        self._loader = loader
        self._patch = patch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


_finder = _Finder()
_finder.patches = {}


def when_imported(name: str, patch: Patch) -> None:
    """Call `patch` with the module of this name: now if it is already imported, else on import."""
    _finder.patches[name] = patch
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if name in sys.modules:
        patch(sys.modules[name])


def wrap(owner: Any, name: str, ours: Callable[..., Any], *others: Any) -> None:
    """Replace a function of a class or a module, if it has one of this name, by `ours`, which is
    called with the original function and its arguments.

    `others` are patched too if they have the same function under this name.
    """
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    for one in others:
        if getattr(one, name, None) is original:
            setattr(one, name, replacement)
    # Each access to a partial method gives a new object.
    setattr(owner, name, replacement)
