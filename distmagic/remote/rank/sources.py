"""Makes the source of cells available on a rank: for tracebacks, warnings, `inspect.getsource` and
compilers.

Also returns what else the payload says about the user's code.
"""

from __future__ import annotations

import inspect
import json
import linecache
import re
import sys
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distmagic.remote.training import import_hooks
from distmagic.remote.values.reductions.source_form import SourceForm

_known: dict[str, str] = {}  # texts of cells, by file name


def load(code: Path) -> dict[str, str]:
    """Put the cells' source into `linecache`; return the labels of cells by file name.

    `code` is a file of the payload.
    """
    sources = read(code)
    know(sources["texts"])
    labels = dict(sources["labels"])
    if labels:
        label_warnings(labels)
    return labels


def know(texts: Mapping[str, str]) -> None:
    """Put the source of cells into `linecache`, by file name."""
    for name, text in texts.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    if texts and not _known:
        import_hooks.wrap(inspect, "getfile", _getfile)
    for name, text in texts.items():
        _known.pop(name, None)  # it is now the latest
        _known[name] = text


def form_of_results(code: Path) -> SourceForm | None:
    """Return how to pickle code in results for a notebook with another minor version of Python: as
    source. None: as byte code, because both have the same version.
    """
    ours = sys.version_info[:2]
    python = tuple(read(code).get("python", ours))
    return None if python == ours else SourceForm(python)


def needs_new(code: Path, loaded: Iterable[str]) -> bool:
    """Whether this payload needs new processes for ranks, because a module in `loaded` must not be
    preloaded.
    """
    names = read(code).get("may_be_loaded")
    if names is None:
        return False
    # `import a.b` also loads a.
    return not all(
        any(f"{name}.".startswith(f"{one}.") for name in names) for one in loaded
    )


def imports(code: Path) -> list[str]:
    """Return the names of the modules that the texts of this payload import."""
    return list(read(code).get("imports", ()))


def import_paths(from_agent: Mapping[str, Any]) -> list[str]:
    """Return the folders of the user's own modules: in the run's working directory, or on the
    notebook machine.

    `from_agent` has the values that the agent passes to its ranks.
    """
    return list(from_agent["paths"] or read(from_agent["code"]).get("roots", ()))


def read(code: str | Path) -> dict[str, Any]:
    """Return the payload's data about the user's sources.

    Raises OSError, ValueError, KeyError, BadZipFile.
    """
    with zipfile.ZipFile(code) as archive:
        found: dict[str, Any] = json.loads(archive.read("sources.json"))
    return found


def _getfile(original: Any, object: Any) -> Any:  # noqa: A002 - the name that it has in inspect
    """For a class that a cell defines, return the cell; `inspect` would look in the file of
    `__main__`.
    """
    if isinstance(object, type) and object.__module__ == "__main__":
        name = re.escape(object.__name__)
        statement = re.compile(rf"^\s*class\s+{name}\b", re.MULTILINE)
        for file in reversed(_known):  # the latest cell that defines it
            if statement.search(_known[file]):
                return file
    return original(object)


def label_warnings(labels: Mapping[str, str]) -> None:
    """Make warnings name the cell, as tracebacks do, instead of a file that does not exist."""

    def formatwarning(
        original: Any, message: object, category: object, filename: str, lineno: int, line: Any = None,
    ) -> str:  # fmt: skip
        text: str = original(message, category, filename, lineno, line)
        if filename not in labels:
            return text
        where = f"{labels[filename]}, line {lineno}:"
        return text.replace(f"{filename}:{lineno}:", where, 1)

    import_hooks.wrap(warnings, "formatwarning", formatwarning)
