"""Updates the user's modules after a change on the notebook's disk: writes them to this host, and
reloads them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.values.call import ModuleText


def bring(
    modules: Sequence[ModuleText], folders: Sequence[str], names: dict[str, Any]
) -> None:
    """Write and reload these modules. Raises the errors of their import.

    They are written to `folders`, from which this rank imports; () on the notebook machine, which
    has them. Functions and classes in `names` that come from them are replaced by the new ones.
    """
    if not modules:
        return  # most cells: the code below makes Python read every zip on sys.path again
    for module in modules:
        if not folders and module.root not in sys.path:
            sys.path.insert(1, module.root)
        for inner, data in module.files.items():
            places = [Path(folder, inner) for folder in folders or (module.root,)]
            place = next((one for one in places if one.exists()), places[-1])
            if folders:
                place.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(place) as file:
                    file.write(data)
            # Python would use byte code of another text with the same second and length.
            with contextlib.suppress(OSError):
                Path(importlib.util.cache_from_source(place)).unlink()
    importlib.invalidate_caches()
    tops = {module.name for module in modules}
    old = {}
    for name, loaded in sys.modules.items():
        if name.partition(".")[0] in tops:
            old[name] = loaded
    _load_again(old)
    for name, value in names.items():
        if isinstance(value, (FunctionType, type)) and value.__module__ in old:
            new = getattr(old[value.__module__], value.__name__, value)
            names[name] = new if type(new) is type(value) else value


def _load_again(old: Mapping[str, ModuleType]) -> None:
    """Import modules as if none were loaded, in the order of their imports.

    The module objects stay the same.
    """
    for name in old:
        del sys.modules[name]
    finder = _OldModules(old)
    sys.meta_path.insert(0, finder)
    try:
        for name in old:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name != name:  # otherwise its file is gone
                    raise
    finally:
        sys.meta_path.remove(finder)
        for name, module in old.items():
            sys.modules.setdefault(name, module)


class _OldModules(importlib.abc.MetaPathFinder):
    """Loads modules into their old module objects."""

    def __init__(self, old: Mapping[str, ModuleType]) -> None:
        self._old = old

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module that existed before, None for all others."""
        others = [one for one in sys.meta_path if one is not self]
        if name not in self._old:
            return None
        found = (one.find_spec(name, path, target) for one in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _IntoOldModule(spec.loader, self._old[name])
        return spec


class _IntoOldModule(importlib.abc.Loader):
    def __init__(self, loader: Any, module: ModuleType) -> None:
        self._loader = loader
        self._module = module

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
