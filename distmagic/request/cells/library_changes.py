"""Finds changes of a library by a cell's text: settings, registrations, attributes. Pure, except
that it looks at loaded modules.

Ranks import the library again, so they do not have these changes. Code inside functions runs on the
ranks, and is not examined.
"""

from __future__ import annotations

import ast
import functools
import linecache
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from distmagic.remote.system.gc_pause import parsed
from distmagic.request.cells.notebook_effects import (
    SEEDS,
    LocalEffect,
    computes,
    dotted,
    executed,
    last_name,
    local_effects,
    targets_of,
)

_OF_RANKS = "#%%"  # prefix of the text of a cell that ran on ranks
# Names of functions that change a library's settings, or register something in it.
_CHANGES = re.compile(
    r"_?(set|register|unregister|add|use|enable|disable|filter|simplefilter|basic|dictConfig|capture|define|impl)"
)
# The same for a call whose result is kept: `before = torch.set_num_threads(3)`, but not `x =
# torch.add(x, 1)`.
_CHANGES_AND_RETURNS = re.compile(
    "(set|register|unregister|use|enable|disable)_|seterr"
)
# Methods that change an object, and those of them whose result is kept.
_OF_OBJECTS = re.compile(
    "(update|setdefault|append|extend|insert|pop|remove|clear|merge)(_|$)"
)
_OF_OBJECTS_AND_RETURNS = re.compile("(setdefault|pop)$")
_UNCHANGEABLE = (str, bytes, int, float, complex, tuple, frozenset, type(None))
_FUNCTIONS = type | FunctionType | BuiltinFunctionType | MethodType
_NOT_OF_A_LIBRARY = (
    "__main__",
    "builtins",
    "distmagic",
    "IPython",
    "matplotlib_inline",
    "sys",
    "os",
)

# The objects that some modules keep: by id, the module and name of each.
Kept = dict[int, list[tuple[str, str]]]
Tables = dict[str, Kept]  # by package


@dataclass(frozen=True)
class _Change:
    """A target or a call in a statement, which may change something in a library."""

    target: ast.expr
    does: str  # describes the change in words
    # It changes an object, not a module, class or function. Otherwise it is no change.
    of_object: bool = False


def library_changes(
    text: str,
    label: str,
    namespace: Mapping[str, object],
    later: Sequence[str],
    tables: Tables,
) -> Iterator[LocalEffect]:
    """Yield changes of a library in a cell's text; `name` is the library.

    `namespace` has the notebook's values.

    For another cell, which has a label, also yield variables and seeds that it sets. Seeds that it
    or a `later` text uses in the notebook are excluded. A cell that ran on ranks has warned about
    these itself. `tables` are made at their first use, and serve all cells of a launch.
    """
    effects, changed, _ = _of_text(text)
    if label and not text.startswith(_OF_RANKS):
        for one in effects:
            if one.kind == "seed":
                is_lost = not any(_of_text(other)[2] for other in later)
            else:
                is_lost = one.kind == "variable"
            if is_lost:
                yield replace(one, words=f"{label}, {one.words}")
    for change in changed:
        library, kept = _library(change, namespace, tables)
        if library and library not in _NOT_OF_A_LIBRARY:
            lineno = change.target.lineno
            where = f"{label}, line {lineno}" if label else f"line {lineno}"
            there = "not on the ranks"
            if kept:
                there = f"which leaves the ranks' {kept} as it is"
            yield LocalEffect(
                kind="library",
                lineno=lineno,
                words=f"{where} {change.does} in the notebook, {there}",
                name=library,
                kept=kept,
            )


# Each launch asks for all cells of the session.
@functools.lru_cache(maxsize=2_000)
def _of_text(text: str) -> tuple[Sequence[LocalEffect], Sequence[_Change], bool]:
    """Return the effects of a cell's text, possible changes of a library, and whether the cell may
    draw random numbers in the notebook.

    The last statement of a cell that ran on ranks draws none there.
    """
    try:
        statements = parsed(text).body
    except SyntaxError:
        return (), (), False
    nodes = [node for statement in statements for node in executed(statement)]
    changed = [one for node in nodes for one in _changed(node)]
    own = statements[:-1] if text.startswith(_OF_RANKS) else statements
    draws = any(computes(one) and not _is_magic(one) for one in own)
    return local_effects(statements), changed, draws


def _is_magic(statement: ast.stmt) -> bool:
    """Whether a statement only calls IPython. The text of a long sum would nest too deeply."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func).startswith(
        "get_ipython()"
    )


def _changed(node: ast.AST) -> Iterator[_Change]:
    """Yield possible changes of a library in one node of the syntax tree."""
    is_alone = isinstance(node, ast.Expr)
    if isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call):
        called, args = node.value.func, node.value.args
        name = last_name(called)
        changes = _CHANGES if is_alone else _CHANGES_AND_RETURNS
        of_objects = _OF_OBJECTS if is_alone else _OF_OBJECTS_AND_RETURNS
        does = f"calls {ast.unparse(called)}"
        if name == "setattr" and args:
            yield _Change(args[0], f"sets an attribute of {ast.unparse(args[0])}")
        elif changes.match(name) and dotted(called) not in SEEDS:
            yield _Change(called, does)
        elif isinstance(called, ast.Attribute) and of_objects.match(name):
            yield _Change(called.value, does, of_object=True)
    for target in targets_of(node):
        if isinstance(target, ast.Attribute | ast.Subscript):
            yield _Change(target, f"sets {ast.unparse(target)}")
        elif isinstance(node, ast.AugAssign):
            yield _Change(target, f"changes {ast.unparse(target)}", of_object=True)


def _library(
    change: _Change, namespace: Mapping[str, object], tables: Tables
) -> tuple[str, str]:
    """Return the library at the start of a change's target, "" if that is a value of the notebook.

    Also return the import name of the object at its start, "" if ranks have that by its name.
    """
    root = change.target
    while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
        root = root.func if isinstance(root, ast.Call) else root.value
    value = namespace.get(root.id) if isinstance(root, ast.Name) else None
    if change.of_object and not _is_object(change.target, namespace):
        return "", ""
    found: object = None
    kept = ""
    if isinstance(value, ModuleType):
        found = value.__name__
    elif isinstance(value, logging.Logger):
        found = "logging"
    elif type(value).__module__ == "torch.library":  # operators
        found = "torch"
    elif isinstance(value, _FUNCTIONS):
        found = value.__module__
    elif not isinstance(value, _UNCHANGEABLE):
        # An object that a module keeps, such as a registry, matplotlib's rcParams or the user's
        # configuration.
        found = kept = _kept_as(value, tables)
    return found.partition(".")[0] if isinstance(found, str) else "", kept


def _is_object(target: ast.expr, namespace: Mapping[str, object]) -> bool:
    """Whether an expression stands for an object that is no module, class or function, and not for
    a call's result.
    """
    if any(isinstance(node, ast.Call) for node in ast.walk(target)):
        return False
    first, *names = dotted(target).split(".")
    value = namespace.get(first)
    for name in names:
        value = vars(value).get(name) if isinstance(value, ModuleType) else None
    return not isinstance(value, ModuleType | _FUNCTIONS)


def _kept_as(value: object, tables: Tables) -> str:
    """Return the import name of an object that a module of the user, or of its class's package,
    keeps; "" if none does.

    If several do, choose the one whose text assigns the object, because the others import it from
    that one.
    """
    found = ""
    for package in ("", str(type(value).__module__).partition(".")[0]):
        if package not in tables:
            tables[package] = _kept_in(package)
        for module_name, name in tables[package].get(id(value), ()):
            found = f"{module_name}.{name}"
            file = getattr(sys.modules.get(module_name), "__file__", None)
            lines = linecache.getlines(file or "")
            if any(re.match(rf"{re.escape(name)}\s*[:=]", line) for line in lines):
                return found
    return found


def _kept_in(package: str) -> Kept:
    """Return the objects of a package's modules, or with "" of the user's: by id, the module and
    name of each.
    """
    table: Kept = {}
    for module_name, module in sys.modules.copy().items():
        top = module_name.partition(".")[0]
        if top == package if package else _is_users(module_name):
            for name, one in getattr(module, "__dict__", {}).copy().items():
                table.setdefault(id(one), []).append((module_name, name))
    return table


@functools.cache
def _is_users(name: str) -> bool:
    """Whether a loaded module is a file of the user's, not an installed one."""
    top = name.partition(".")[0]
    if top in _NOT_OF_A_LIBRARY or top in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
    return isinstance(file, str) and "-packages/" not in file
