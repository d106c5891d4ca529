"""The course's notebooks, and the solutions of their exercises, which solutions.md has."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from types import ModuleType

import nbformat
from nbformat import NotebookNode

from tests import REPOSITORY

COURSE = REPOSITORY / "notebooks"
NOTEBOOKS = sorted(COURSE.glob("*.ipynb"))


def tagged(notebook: NotebookNode, tag: str) -> list[NotebookNode]:
    """Return the cells with this tag."""
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


def solutions(name: str) -> list[str]:
    """Return the blocks of code that solve the exercises of the notebook `name`, such as 00_quickstart."""
    text = (COURSE / "solutions.md").read_text()
    _, _, rest = text.partition(f"## {name}\n")
    section = re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def solved(name: str) -> NotebookNode:
    """Return the notebook with its exercises solved: a cell of magics by the next such block, the others by all others."""
    notebook = nbformat.read(COURSE / f"{name}.ipynb", 4)
    blocks = solutions(name)
    on_ranks = iter([block for block in blocks if block.startswith("%%")])
    answers = "".join(block for block in blocks if not block.startswith("%%"))
    for cell in tagged(notebook, "exercise"):
        cell.source = next(on_ranks) if cell.source.startswith("%%") else answers
    assert next(on_ranks, None) is None, "a solution without its exercise"
    return notebook


def as_found(executed: NotebookNode, path: Path) -> NotebookNode:
    """Return an executed notebook without the answers of its exercises, and without widgets of the kernel that is gone."""
    found = copy.deepcopy(executed)
    found.metadata.pop("widgets", None)
    for cell, original in zip(found.cells, nbformat.read(path, 4).cells, strict=True):
        if {"exercise", "check"} & set(original.metadata.get("tags", ())):
            cell.source, cell.outputs = original.source, []
    return found


def exercises() -> ModuleType:
    """Return the notebooks' module `course`."""
    sys.path.insert(0, str(COURSE))
    try:
        import course
    finally:
        sys.path.remove(str(COURSE))
    return course
