"""The vocabulary, checked: a class name, or a name of a type, stands for one thing in all of `distmagic/`."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests import REPOSITORY

# The names that may stand for two things, and why.
TWICE = {
    "Detached": "a message is called on the wire as its class is, and the object that a user holds has this name, too"
}


def definitions(files: Iterable[Path]) -> dict[str, list[str]]:
    """Return where each class and each name of a type is defined.

    A type that is written out under the same name twice is the same type: it counts once.
    """
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in files:
        tree = ast.parse(path.read_text())
        for number, name, text in [*_classes(tree), *_types(tree)]:
            found[name][text or f"{path}:{number}"] = f"{path}:{number}"
    return {name: list(places.values()) for name, places in found.items()}


def _classes(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.lineno, node.name, ""


def _types(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield the names that a module gives to types, `Post = Callable[[Bar], None]`, each with its type."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name.lstrip("_")[:1].isupper() and not name.isupper():
                yield node.lineno, name, ast.unparse(node.value)


def test_every_class_name_stands_for_one_thing():
    found = definitions(sorted((REPOSITORY / "distmagic").rglob("*.py")))
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert {name: twice[name] for name in twice if name not in TWICE} == {}, (
        "a second class has a name that is taken: call one of them by what it does"
    )
    assert set(TWICE) - set(twice) == set(), "these stand for one thing by now"
