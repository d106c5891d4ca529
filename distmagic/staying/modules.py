"""The user's modules that cells on ranks that stay import: their current text on disk, and which of
them ranks lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from distmagic.payload import local_modules
from distmagic.payload.local_modules import LocalModule
from distmagic.remote.values.call import ModuleText


def texts_of(modules: Iterable[LocalModule]) -> list[ModuleText]:
    """Return the current text of local modules."""
    found = []
    for module in modules:
        roots = [module.root, *(place.parent for place in module.places)]
        files = {}
        for path, data in local_modules.python_texts(module):
            root = next(one for one in roots if Path(path).is_relative_to(one))
            files[str(Path(path).relative_to(root))] = data
        text = ModuleText(name=module.name, root=str(module.root), files=files)
        found.append(text)
    return found


def stale(
    modules: Sequence[ModuleText], there: Mapping[str, ModuleText]
) -> tuple[ModuleText, ...]:
    """Return the modules that are missing or outdated on the ranks, and the modules that import
    them. `there` are the modules that the ranks have, by name.
    """
    found = {module.name for module in modules if there.get(module.name) != module}
    known = set[str]()
    while found != known:
        known = set(found)
        for module in modules:
            for text in module.files.values():
                for name in local_modules.imports_of_text(text):
                    if name.partition(".")[0] in known:
                        found.add(module.name)
    return tuple(module for module in modules if module.name in found)
