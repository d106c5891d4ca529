"""Where the user's own modules are on a host: in the run's working directory, or where they lie on the notebook's machine."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distmagic.remote.wire.parts import WorkDir


def of_work_dir(work: WorkDir | None) -> list[str]:
    """Return the directories to import from: that in which ranks begin, and the working directory itself.

    [] for a node that has no working directory of its own: it is the notebook's own machine.
    """
    if work is None:
        return []
    return list(
        dict.fromkeys([os.path.join(work.path, work.inside).rstrip("/"), work.path])
    )


def of_rank(from_agent: Mapping[str, Any]) -> list[str]:
    """Return the directories to import from; `from_agent` is what the agent has passed to its ranks."""
    return list(from_agent["paths"] or of_code(from_agent["code"]))


def of_code(code: str | Path) -> list[str]:
    """Return the directories of the notebook's machine that a payload's local modules lie in."""
    with zipfile.ZipFile(code) as archive:
        return [
            str(path)
            for path in json.loads(archive.read("sources.json")).get("roots", ())
        ]


def top_level_names(folder: str) -> set[str]:
    """Return the names of modules and packages that an import finds in a folder; none where it can't be read."""
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
