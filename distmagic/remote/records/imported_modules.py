"""Notes which modules a rank has imported that are not Python's own, so that the next run finds them loaded.

Which of them belong to packages that are installed is looked at by the process that loads them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from distmagic.remote.records.atomic_file import atomic_write

FILE = "imported.json"
_LOADED_ANYWAY = ("distmagic", "torch", "cloudpickle", "__main__")
_MOST = 6000


def write(folder: Path, own: Sequence[str]) -> None:
    """Write the names of the modules into a node's folder; those in the directories `own` are the user's. Errors are ignored."""
    beside = tuple(f"{path.rstrip('/')}/" for path in own)
    names = []
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package in sys.stdlib_module_names or package in _LOADED_ANYWAY:
            continue
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if spec is None or spec.name != name or not isinstance(origin, str):
            continue  # it is an alias, or was made at run time
        if os.path.isabs(origin) and not origin.startswith(beside):
            names.append(name)
    with contextlib.suppress(OSError), atomic_write(folder / FILE) as file:
        file.write(json.dumps(names[:_MOST]).encode())
