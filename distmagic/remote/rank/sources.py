"""Makes the text of cells known on a rank: to tracebacks, warnings, `inspect.getsource`, Triton, torch.jit and torch.compile."""

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

from distmagic.remote.values.source_form import SourceForm

_known: dict[str, str] = {}  # texts of cells, by file name


def load(code: Path) -> dict[str, str]:
    """Put the cells' text into `linecache`; return the labels of cells by file name. `code` is a file of the payload."""
    sources = read(code)
    know(sources["texts"])
    labels = dict(sources["labels"])
    if labels:
        label_warnings(labels)
    return labels


def know(texts: Mapping[str, str]) -> None:
    """Put the text of cells into `linecache`, by file name."""
    for name, text in texts.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    if texts and not _known:
        # Have `inspect` look for a class of a cell in that cell; it would look in the file of `__main__`, as of any program.
        plain = inspect.getfile

        def getfile(object: Any) -> str:  # noqa: A002 - the name that it has in inspect
            if isinstance(object, type) and object.__module__ == "__main__":
                return _cell_of(object, _known) or plain(object)
            return plain(object)

        inspect.getfile = getfile
    _known.update(texts)


def form_of_results(code: Path) -> SourceForm | None:
    """Return how results travel: without byte code, where the notebook has a Python of another minor version."""
    ours = sys.version_info[:2]
    python = tuple(read(code).get("python", ours))
    return None if python == ours else SourceForm(python)


def needs_new(code: Path, loaded: Iterable[str]) -> bool:
    """Whether the ranks of this payload must be new processes, as not all that is `loaded` may be loaded when they begin."""
    names = read(code).get("may_be_loaded")
    if names is None:
        return False
    # `import a.b` loads a, too.
    allowed = {
        name[:end]
        for name in names
        for end in (*(dot.start() for dot in re.finditer(r"\.", name)), len(name))
    }
    return not allowed.issuperset(loaded)


def imports(code: Path) -> list[str]:
    """Return the names of what the texts of this payload import."""
    return [str(name) for name in read(code).get("imports", ())]


def read(code: Path) -> dict[str, Any]:
    """Return what the payload tells of the user's sources. Raises OSError, ValueError, KeyError, BadZipFile."""
    with zipfile.ZipFile(code) as archive:
        found: dict[str, Any] = json.loads(archive.read("sources.json"))
    return found


def _cell_of(cls: type, texts: Mapping[str, str]) -> str:
    """Return the cell that defines a class: that of one of its methods, else one with such a statement. "" for none."""
    for member in list(vars(cls).values()):
        function = member
        # Of class methods, properties, decorated functions.
        for name in (
            "__func__",
            "fget",
            "func",
            "__wrapped__",
        ):
            function = getattr(function, name, None) or function
        is_its_own = getattr(function, "__qualname__", "").startswith(
            f"{cls.__qualname__}."
        )
        filename = getattr(getattr(function, "__code__", None), "co_filename", "")
        if is_its_own and filename in texts:
            return str(filename)
    statement = re.compile(rf"^\s*class\s+{re.escape(cls.__name__)}\b", re.MULTILINE)
    return next((name for name, text in texts.items() if statement.search(text)), "")


def label_warnings(labels: dict[str, str]) -> None:
    """Have warnings name the cell as tracebacks do, in place of a file that does not exist."""
    plain = warnings.formatwarning

    def formatwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        text = plain(message, category, filename, lineno, line)
        if filename not in labels:
            return text
        where = f"{labels[filename]}, line {lineno}:"
        return text.replace(f"{filename}:{lineno}:", where, 1)

    warnings.formatwarning = formatwarning
