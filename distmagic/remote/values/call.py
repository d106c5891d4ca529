"""What a payload's parcel holds, and how a rank runs it: one call of the notebook's, or a cell's whole text."""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.values import parcel

MAIN_FILE = "distmagic_main.py"
_RESULT = "__distmagic_result__"
_MAIN_TEXT = '''"""What the children of a rank (DataLoader workers, say) have as their __main__. By distmagic."""
from distmagic.remote.values import call
'''
_DEFINING = (
    ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
)


@dataclass(frozen=True)
class Call:
    """A function without arguments, or one that gives a coroutine: the cell's last expression."""

    thunk: Callable[[], object]


@dataclass(frozen=True)
class Whole:
    """The text of a cell that runs as a whole, as a file `filename` in the working directory that nobody has written.

    `argv` is its `sys.argv` where it runs as a script.
    """

    source: str
    filename: str
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stay:
    """No call: the rank stays, and runs one cell after the other in one `__main__`."""


@dataclass(frozen=True)
class Cell:
    """A cell for ranks that stay. Its tracebacks find its lines by `filename`, as the notebook does.

    `names` are values of the notebook that it uses, `texts` those of its cells whose code comes along, and of this one,
    `labels` what to call them. `is_given`: the ranks have these names for good, as if they had made them. `keeps`: the
    value of the last expression goes into a file, however large it is. `modules` are those that the ranks are to load again.
    """

    source: str
    filename: str
    names: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    is_given: bool = False
    keeps: bool = False
    modules: tuple[ModuleText, ...] = ()


@dataclass(frozen=True)
class ModuleText:
    """A module of the user's as it is on disk: its Python files by their paths below `root`, which it is imported from."""

    name: str
    root: str
    files: dict[str, bytes]


@dataclass(frozen=True)
class Script:
    """A script, or a module that is run as `python -m` runs it, with its arguments.

    `path` is the script's below the working directory, or the module's name. `shown` is the script as the user named
    it, which its `sys.argv` begins with; "" for its whole path. `origin` is where it lies on the notebook's machine.
    `roots` are directories below the working directory that it imports from, after its own.
    """

    path: str
    args: tuple[str, ...]
    is_module: bool = False
    shown: str = ""
    origin: str = ""
    roots: tuple[str, ...] = ()


def load(
    path: str | os.PathLike[str], main: ModuleType
) -> Call | Whole | Stay | Cell | Script:
    """Return what the payload at `path` asks for. What it captured become attributes of `main`.

    `main` must be in `sys.modules` as `__main__` already. Its `__file__` afterwards is `main`'s own again, whatever
    the notebook's was. Raises `ParcelError`.
    """
    file = main.__dict__.get("__file__")
    what = parcel.load(path, main.__dict__)
    if file is not None:
        main.__file__ = file
    if not isinstance(what, (Call, Whole, Stay, Cell, Script)):
        raise parcel.ParcelError(
            f"{path} holds a {type(what).__name__}, not a payload."
        )
    return what


def perform(what: Call | Whole | Cell, main: ModuleType) -> object:
    """Run it in `main` and return its value: of the call, or of the cell's last expression (else None).

    A coroutine is run to its end; a whole cell may `await` at its top. Raises whatever the user's code raises.
    """
    if isinstance(what, Call):
        return _finished(what.thunk())
    if isinstance(what, Whole) and what.argv:
        sys.argv[:] = what.argv
    main.__dict__.pop(_RESULT, None)
    tree = ast.parse(what.source, what.filename)
    # As in a notebook, where an assignment shows nothing.
    if isinstance(what, Whole) or (tree.body and isinstance(tree.body[-1], ast.Expr)):
        tree = _returning(tree)
    _run(tree, what.filename, main.__dict__)
    return _finished(main.__dict__.pop(_RESULT, None))


def _finished(value: object) -> object:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _run(tree: ast.Module, filename: str, namespace: dict[str, Any]) -> None:
    code: CodeType = compile(
        tree, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
    )
    _finished(eval(code, namespace))  # noqa: S307 - the user's cell


def _returning(tree: ast.Module) -> ast.Module:
    """Keep the value of the last expression, or of the last assignment to a name, under `_RESULT`."""
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        value = last.value
    elif isinstance(last, ast.Assign) and isinstance(last.targets[-1], ast.Name):
        value = ast.copy_location(ast.Name(last.targets[-1].id, ast.Load()), last)
    else:
        return tree
    keep = ast.copy_location(ast.Assign([ast.Name(_RESULT, ast.Store())], value), last)
    body = [*tree.body[:-1], *([] if isinstance(last, ast.Expr) else [last]), keep]
    return ast.fix_missing_locations(ast.Module(body, tree.type_ignores))


def write_main(file: Path, *paths: str | os.PathLike[str]) -> str:
    """Write the file that a rank's `__main__.__file__` has to name, and return its path.

    A child process that is spawned (not forked) runs that file as its own `__main__`: it finds there what the
    payloads and cells at `paths` define. The bundle and the payload's modules must be on the parent's `sys.path`.
    """
    text = _MAIN_TEXT
    for path in paths:
        text += f"call.define({os.path.abspath(path)!r}, globals())\n"
    with atomic_write(file) as out:
        out.write(text.encode())
    return str(file)


def defines(cell: Cell) -> bool:
    """Whether a child process may ask for something that a cell defines, or brings. Raises `SyntaxError`."""
    body = ast.parse(cell.source, cell.filename).body
    return bool(cell.names) or any(isinstance(one, _DEFINING) for one in body)


def define(path: str, namespace: dict[str, Any]) -> None:
    """Fill `namespace` with what the payload at `path` defines, in a child process. The call is not made.

    Of a whole cell all runs but a last expression, with `__name__` as it is in such a child: `__mp_main__`. Of a cell for
    ranks that stay only imports, functions and classes are run.
    """
    what = parcel.load(path, namespace)
    if isinstance(what, Cell):
        namespace.update(what.names)
        for statement in ast.parse(what.source, what.filename).body:
            if isinstance(statement, _DEFINING):
                # One that uses a value of its rank is missed where a child asks for it, and nowhere else.
                with suppress(Exception):
                    _run(ast.Module([statement], []), what.filename, namespace)
    if isinstance(what, Whole):
        namespace["__file__"] = os.path.abspath(what.filename)
        lines = what.source.splitlines(keepends=True)
        linecache.cache[what.filename] = (len(what.source), None, lines, what.filename)
        tree = ast.parse(what.source, what.filename)
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            tree.body.pop()
        _run(tree, what.filename, namespace)
