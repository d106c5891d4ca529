"""Import paths of the user's own modules: the run's working directory, or their folders on the notebook machine."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distmagic.remote.wire.parts import WorkDir


def of_work_dir(work: WorkDir | None) -> list[str]:
    """Return the directories to import from: the one in which ranks start, and the working directory itself.

    [] for a node without its own working directory, which is the notebook machine.
    """
    if work is None:
        return []
    return list(
        dict.fromkeys([os.path.join(work.path, work.inside).rstrip("/"), work.path])
    )


def of_rank(from_agent: Mapping[str, Any]) -> list[str]:
    """Return the directories to import from; `from_agent` has the values that the agent passes to its ranks."""
    return list(from_agent["paths"] or of_code(from_agent["code"]))


def of_code(code: str | Path) -> list[str]:
    """Return the folders of a payload's local modules on the notebook machine."""
    with zipfile.ZipFile(code) as archive:
        return [
            str(path)
            for path in json.loads(archive.read("sources.json")).get("roots", ())
        ]


def top_level_names(folder: str) -> set[str]:
    """Return the names of modules and packages that can be imported from a folder; none if it is unreadable."""
    names = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith((".py", ".so")):
                    names.add(entry.name.partition(".")[0])
                elif os.path.isfile(os.path.join(entry.path, "__init__.py")):
                    names.add(entry.name)
    except OSError:
        return names
    return names
