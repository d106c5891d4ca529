"""The contents of a payload's parcel, and how a rank runs it: one call from the notebook, or a
cell's whole text.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.system.gc_pause import parsed
from distmagic.remote.values import parcel

MAIN_FILE = "distmagic_main.py"
_RESULT = "__distmagic_result__"
_MAIN_TEXT = '''"""What the children of a rank (DataLoader workers, say) have as their __main__. By distmagic."""
from distmagic.remote.values import call
'''
# Names that IPython gives to outputs and inputs, and that of the last run.
_OF_IPYTHON = re.compile(r"_+|_i+|_i?\d+|_[dio]h|_exit_code|_run|__\w*")
_DEFINING = (
    ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
)


@dataclass(frozen=True)
class Call:
    """A function without arguments, or one that returns a coroutine: the cell's last expression."""

    thunk: Callable[[], object]


@dataclass(frozen=True)
class Whole:
    """The text of a cell that runs as a whole, as if it were a file `filename` in the working
    directory.

    `argv` is its `sys.argv` if it runs as a script.
    """

    source: str
    filename: str
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stay:
    """No call: the rank stays alive, and runs one cell after the other in one `__main__`."""


@dataclass(frozen=True)
class Cell:
    """A cell for ranks that stay."""

    source: str
    filename: str  # tracebacks find its lines by this name, as in the notebook
    # values of the notebook that it uses
    names: dict[str, Any] = field(default_factory=dict)
    # sources of the cells whose code is included, and of this cell
    texts: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)  # display names of these cells
    is_given: bool = False  # the ranks treat these names as if they had assigned them
    # the value of the last expression is written to a file, whatever its size
    keeps: bool = False
    modules: tuple[ModuleText, ...] = ()  # modules that the ranks reload
    # the user wrote it, so its exception stays for a debugger until the next such cell
    is_users: bool = False


@dataclass(frozen=True)
class ModuleText:
    """The current text of a user's module: its Python files by their paths below `root`, its import
    folder.
    """

    name: str
    root: str
    files: dict[str, bytes]


@dataclass(frozen=True)
class Script:
    """A script, or a module that is run as by `python -m`, with its arguments."""

    path: str  # the script's path below the working directory, or the module's name
    args: tuple[str, ...]
    is_module: bool = False
    # the script as the user typed it, for `sys.argv[0]`; "" for its whole path
    shown: str = ""
    origin: str = ""  # its path on the notebook machine
    # directories below the working directory from which it imports, after its own
    roots: tuple[str, ...] = ()


def load(
    path: str | os.PathLike[str], main: ModuleType
) -> Call | Whole | Stay | Cell | Script:
    """Return the contents of the payload at `path`. Captured values become attributes of `main`.

    `main` must already be in `sys.modules` as `__main__`. Its `__file__` is restored afterwards.
    Raises `ParcelError`.
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
    """Run a call or a cell in `main`, and return its value.

    The value of a cell is that of its last expression, or None. A coroutine is awaited; a whole
    cell may use `await` at its top level. Raises the user's exceptions.
    """
    if isinstance(what, Call):
        return _finished(what.thunk())
    if isinstance(what, Whole) and what.argv:
        sys.argv[:] = what.argv
    main.__dict__.pop(_RESULT, None)
    tree = parsed(what.source, what.filename)
    # As in a notebook, where an assignment shows nothing.
    if isinstance(what, Whole) or (tree.body and isinstance(tree.body[-1], ast.Expr)):
        _keep_result(tree)
    _run(tree, what.filename, main.__dict__)
    return _finished(main.__dict__.pop(_RESULT, None))


def _finished(value: object) -> object:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _run(tree: ast.Module, filename: str, namespace: dict[str, Any]) -> None:
    code: CodeType = compile(
        tree, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
    )
    _finished(eval(code, namespace))  # noqa: S307 - the user's cell


def _keep_result(tree: ast.Module) -> None:
    """Store the value of the last expression, or of the last assignment to a name, under
    `_RESULT`.
    """
    last = tree.body[-1] if tree.body else None
    kept = ast.Name(_RESULT, ast.Store())
    if isinstance(last, ast.Expr):
        tree.body[-1] = ast.copy_location(ast.Assign([kept], last.value), last)
    if isinstance(last, ast.Assign) and isinstance(last.targets[-1], ast.Name):
        last.targets.append(kept)
    ast.fix_missing_locations(tree)


def write_main(
    file: Path, *paths: str | os.PathLike[str], spare: Path | None = None
) -> str:
    """Write the file for a rank's `__main__.__file__`, and return its path: in the folder `spare`
    if it can't be written.

    A spawned (not forked) child process runs that file as its own `__main__`, and finds in it the
    definitions of the payloads and cells at `paths`. The bundle and the payload's modules must be
    on the parent's `sys.path`.
    """
    text = _MAIN_TEXT
    for path in paths:
        text += f"call.define({os.path.abspath(path)!r}, globals())\n"
    try:
        with atomic_write(file) as out:
            out.write(text.encode())
    except OSError:
        if spare is None:
            raise
        return write_main(spare / file.name, *paths)
    return str(file)


def defines(cell: Cell) -> frozenset[str]:
    """Return the names and imports of a cell that a child process may need.

    Raises `SyntaxError`.
    """
    found = set(cell.names)
    for one in parsed(cell.source, cell.filename).body:
        if isinstance(one, _DEFINING):
            found.add(getattr(one, "name", "") or ast.unparse(one))
    return frozenset(found)


def assigned(cell: Cell) -> set[str]:
    """Return the names that a cell assigns in any case, outside of blocks.

    The new value may be the old one.
    """
    found = set()
    for statement in parsed(cell.source, cell.filename).body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AugAssign | ast.AnnAssign) and statement.value:
            targets = [statement.target]
        else:
            continue
        for target in targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.add(node.id)
    return found


def expanded(fill: Callable[[], str], command: str) -> str:
    """Return a shell's command with its `{values}`; the command as it is if that fails, as IPython
    does.
    """
    try:
        return fill()
    except Exception:  # noqa: BLE001 - braces that are the shell's
        return command


def is_of_user(name: str) -> bool:
    """Whether a name of `__main__` is the user's, such as `_helper`, and not one of IPython's."""
    return not _OF_IPYTHON.fullmatch(name)


def define(path: str, namespace: dict[str, Any]) -> None:
    """Add the definitions of the payload at `path` to `namespace`, in a child process.

    The call is not made.

    A whole cell runs without its last expression, with `__name__` as in such a child:
    `__mp_main__`. From a cell for ranks that stay, only imports, functions and classes are run.
    """
    what = parcel.load(path, namespace)
    if isinstance(what, Cell):
        namespace.update(what.names)
        for statement in parsed(what.source, what.filename).body:
            if isinstance(statement, _DEFINING):
                # A definition that needs a value of its rank is only missing if the child uses it.
                with suppress(Exception):
                    _run(ast.Module([statement], []), what.filename, namespace)
    if isinstance(what, Whole):
        namespace["__file__"] = os.path.abspath(what.filename)
        lines = what.source.splitlines(keepends=True)
        linecache.cache[what.filename] = (len(what.source), None, lines, what.filename)
        tree = parsed(what.source, what.filename)
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            tree.body.pop()
        _run(tree, what.filename, namespace)
