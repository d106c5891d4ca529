"""Keeps the garbage collector from scanning the same objects again and again: loaded modules, a
notebook's own. Also keeps it out of the parser.
"""

from __future__ import annotations

import ast
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_parser = threading.Lock()


def parsed(
    text: str | bytes,
    filename: str = "<unknown>",
    version: tuple[int, ...] | None = None,
) -> ast.Module:
    """Return the syntax tree of a program, as `ast.parse` does, in any thread.

    Before Python 3.12 the collector runs while the tree is made, and objects that it ends may let
    another thread run. If that thread parses too, `ast.parse` raises SystemError (CPython issue
    106905). `version` is the oldest Python that must read it. Raises what `ast.parse` raises.
    """
    tree = _parsed(text, filename, "exec", version)
    assert isinstance(tree, ast.Module)
    return tree


def parsed_expression(text: str) -> ast.expr:
    """Return the syntax tree of an expression, as `parsed` does."""
    tree = _parsed(text, "<unknown>", "eval", None)
    assert isinstance(tree, ast.Expression)
    return tree.body


def _parsed(
    text: str | bytes, filename: str, mode: str, version: tuple[int, ...] | None
) -> ast.AST:
    with _parser:
        was_on = gc.isenabled()
        try:
            gc.disable()
            return ast.parse(text, filename, mode, feature_version=version)  # type: ignore[arg-type]
        finally:
            if was_on:
                gc.enable()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Run the block without the collector, and freeze all objects at its end: the collector never
    scans them again.

    With torch loaded one collection takes 0.1 s, and Python runs several when it exits: 0.5 s.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@contextmanager
def heap_left_alone() -> Iterator[None]:
    """Exclude existing objects from all collections in the block, unless other code has already
    frozen some.

    A thousand ranks at 10 Hz make the collector scan all objects several times a second: a third of
    the whole cost. Do not use it for a short run: each freeze restarts Python's count for the next
    full collection. A notebook that freezes in every cell would never have one.
    """
    if gc.get_freeze_count() > 0:
        yield
        return
    gc.collect()  # later, garbage would not be found
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
