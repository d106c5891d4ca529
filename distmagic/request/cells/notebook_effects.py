"""Finds statements that only affect the notebook, although under torchrun they would affect every
rank.

A program that was pasted into a cell reads its rank, parses arguments, sets seeds and variables at
its top. In a cell, these lines run in the notebook, which is no rank. A cell may also change a
library's settings, registrations or attributes, but ranks import the library again. Pure, from the
syntax tree. Code inside functions runs on the ranks, and is not examined.
"""

from __future__ import annotations

import ast
import functools
import linecache
import logging
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Literal

from distmagic.remote.frozen import frozen
from distmagic.remote.system.torchrun_variables import TORCHRUN_VARIABLES

CURE = "Move it into the function, or write %%distributed --whole, and every rank runs the whole cell."
_CURE_OF_LIBRARIES = (
    "Ranks import libraries themselves: do it inside the function, too."
)
_CURE_OF_KEPT = (
    "Ranks import modules themselves: inside the function, do it to {}, too."
)
_CURE_OF_VARIABLES = "Ranks get variables by --env NAME=VALUE."
_NAMED_AT_MOST = 4
_OF_RANKS = "#%%"  # prefix of the text of a cell that ran on ranks

ENVIRON = ("os.environ", "environ")
# Without a leading `os.`.
_SETENV = ("putenv", "unsetenv", "environ.setdefault", "environ.pop")
_SETS_MANY = ("environ.update", "environ.clear", "load_dotenv", "dotenv.load_dotenv")
_SETS_LIST = ("append", "extend", "insert", "pop", "remove", "clear")
_PARSE = ("parse_args", "parse_known_args", "parse_args_into_dataclasses")
_SEEDS = {
    "random.seed", "np.random.seed", "numpy.random.seed", "torch.manual_seed", "manual_seed", "torch.random.manual_seed",
    "torch.cuda.manual_seed", "torch.cuda.manual_seed_all", "set_seed", "transformers.set_seed", "accelerate.utils.set_seed",
    "seed_everything", "pl.seed_everything", "L.seed_everything", "lightning.seed_everything",
}  # fmt: skip

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

Kind = Literal["library", "rank", "argv", "sets argv", "seed", "group", "variable"]
# The kind of effect, and the environment variable.
Act = tuple[Kind, str]
_IN_WORDS: dict[Kind, str] = {
    "rank": "reads {} of the notebook, not of a rank",
    "argv": "reads the command line of the notebook, not of a rank",
    "sets argv": "sets sys.argv of the notebook, not of the ranks",
    "seed": "seeds the notebook, not the ranks",
    "group": "makes a process group in the notebook, which is not a rank",
    "variable": "sets {} in the notebook, not on the ranks",
}


@frozen
class LocalEffect:
    """An effect of a statement in the notebook, in words: `line 4 reads LOCAL_RANK of the notebook,
    not of a rank`.
    """

    kind: Kind
    lineno: int
    # those of the whole statement, empty for a library's change
    lines: range = range(0)
    words: str
    name: str = ""  # of an environment variable, or of the library, "" if none
    # import name of an object that a module keeps: ranks get a copy of it
    kept: str = ""


# By package, the objects that its modules keep: by id, the module and name of each.
Tables = dict[str, dict[int, list[tuple[str, str]]]]
_IN_PLACE: dict[type[ast.operator], str] = {
    ast.Add: "__iadd__",
    ast.Sub: "__isub__",
    ast.Mult: "__imul__",
    ast.Div: "__itruediv__",
    ast.BitOr: "__ior__",
    ast.BitAnd: "__iand__",
    ast.BitXor: "__ixor__",
}


@dataclass(frozen=True)
class _Change:
    """A target or a call in a statement, which may change something in a library."""

    target: ast.expr
    does: str  # describes the change in words
    # It changes an object, not a module, class or function. Otherwise it is no change.
    of_object: bool = False
    # It changes only an object with this method: without `__iand__`, `ok &= True` only gives the
    # name another object.
    method: str = ""


def local_effects(
    statements: Sequence[ast.stmt], given: Collection[str] = ()
) -> tuple[LocalEffect, ...]:
    """Return the effects of these statements on the notebook only, in order.

    `given` are variables that ranks get anyway. A seed only counts if no later statement uses it in
    the notebook: data that is drawn in the notebook is sent to the ranks.
    """
    found: list[LocalEffect] = []
    for index, statement in enumerate(statements):
        is_data = any(_computes(later) for later in statements[index:])
        for effect in _of_statement(statement):
            is_given = effect.name in given or effect.name.startswith("DISTMAGIC_")
            if not is_given and not (is_data and effect.kind == "seed"):
                found.append(effect)
    # A command line that the cell itself writes and then parses: its arguments are sent as values.
    kinds = [effect.kind for effect in found]
    if "sets argv" in kinds and "argv" in kinds[kinds.index("sets argv") :]:
        found = [one for one in found if one.kind not in ("argv", "sets argv")]
    return tuple(found)


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
    effects, changed = _of_text(text)
    if label and not text.startswith(_OF_RANKS):
        for one in effects:
            is_seed = one.kind == "seed" and not any(map(_draws, later))
            if is_seed or one.kind == "variable":
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
def _of_text(text: str) -> tuple[Sequence[LocalEffect], Sequence[_Change]]:
    """Return the effects of a cell's text, and possible changes of a library."""
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return (), ()
    nodes = [node for statement in statements for node in executed(statement)]
    changed = [one for node in nodes for one in _changed(node)]
    return local_effects(statements), changed


@functools.lru_cache(maxsize=2_000)
def _draws(text: str) -> bool:
    """Whether a cell may draw random numbers in the notebook.

    The last statement of a cell that ran on ranks does not count.
    """
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return False
    if text.startswith(_OF_RANKS):
        del statements[-1:]
    own = [
        one for one in statements if not ast.unparse(one).startswith("get_ipython()")
    ]
    return any(map(_computes, own))


def _changed(node: ast.AST) -> Iterator[_Change]:
    """Yield possible changes of a library in a node."""
    is_alone = isinstance(node, ast.Expr)
    if isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call):
        called, args = node.value.func, node.value.args
        name = _last(called)
        changes = _CHANGES if is_alone else _CHANGES_AND_RETURNS
        of_objects = _OF_OBJECTS if is_alone else _OF_OBJECTS_AND_RETURNS
        does = f"calls {ast.unparse(called)}"
        if name == "setattr" and args:
            yield _Change(args[0], f"sets an attribute of {ast.unparse(args[0])}")
        elif changes.match(name) and dotted(called) not in _SEEDS:
            yield _Change(called, does)
        elif isinstance(called, ast.Attribute) and of_objects.match(name):
            yield _Change(called.value, does, of_object=True)
    for target in _targets(node):
        if isinstance(target, ast.Attribute | ast.Subscript):
            yield _Change(target, f"sets {ast.unparse(target)}")
        elif isinstance(node, ast.AugAssign):
            method = _IN_PLACE.get(type(node.op), "")
            yield _Change(target, f"changes {ast.unparse(target)}", True, method)


def _targets(node: ast.AST) -> list[ast.expr]:
    """Return the targets that a statement sets or deletes."""
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    return []


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
    if change.method and not hasattr(type(value), change.method):
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


def _kept_in(package: str) -> dict[int, list[tuple[str, str]]]:
    """Return the objects of a package's modules, or with "" of the user's: by id, the module and
    name of each.
    """
    table: dict[int, list[tuple[str, str]]] = {}
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


def note(effects: Sequence[LocalEffect]) -> str:
    """Return all effects as one paragraph, "" for none."""
    if not effects:
        return ""
    words = [effect.words for effect in effects[:_NAMED_AT_MOST]]
    if len(effects) > _NAMED_AT_MOST:
        words.append(f"and {len(effects) - _NAMED_AT_MOST} more")
    cure = CURE if len(effects) == 1 else CURE.replace("it", "them", 1)
    if all(effect.kind == "library" for effect in effects):
        cure = _CURE_OF_LIBRARIES
        kept = next((effect.kept for effect in effects if effect.kept), "")
        if kept:
            cure = _CURE_OF_KEPT.format(kept)
    if any(effect.kind == "variable" for effect in effects):
        cure += f" {_CURE_OF_VARIABLES}"
    sentence = "; ".join(words)
    return f"{sentence[0].upper()}{sentence[1:]}. {cure}"


def _computes(statement: ast.stmt) -> bool:
    """Whether a statement calls something that may draw random numbers: anything except seeds and
    definitions.
    """
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    calls = [node for node in executed(statement) if isinstance(node, ast.Call)]
    return any(dotted(call.func) not in _SEEDS for call in calls)


def _of_statement(statement: ast.stmt) -> Iterator[LocalEffect]:
    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    set_here = {id(part) for node in executed(statement) for part in _set_by(node)}
    for node in executed(statement):
        found = list(acts(node))
        if isinstance(node, ast.Attribute) and dotted(node) == "sys.argv":
            found = [("sets argv" if id(node) in set_here else "argv", "")]
        for kind, name in found:
            lineno = getattr(node, "lineno", statement.lineno)
            does = _IN_WORDS[kind].format(name or "variables")
            yield LocalEffect(
                kind=kind,
                lineno=lineno,
                lines=lines,
                words=f"line {lineno} {does}",
                name=name,
            )


def _set_by(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node's targets: `sys.argv` in `sys.argv[1:] = [...]` and in
    `sys.argv.append(...)`.
    """
    targets = _targets(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        targets = [node.func.value] if node.func.attr in _SETS_LIST else []
    for target in targets:
        yield from ast.walk(target)


def acts(node: ast.AST) -> Iterator[Act]:
    """Yield the effects of this node's own evaluation."""
    if isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.AugAssign) and dotted(node.target) in ENVIRON:
        yield "variable", ""
    elif isinstance(node, ast.Subscript) and dotted(node.value) in ENVIRON:
        name = _text(node.slice)
        if not isinstance(node.ctx, ast.Load):
            yield "variable", name
        elif name in TORCHRUN_VARIABLES:
            yield "rank", name
    elif isinstance(node, ast.Compare) and dotted(node.comparators[-1]) in ENVIRON:
        name = _text(node.left)
        if name in TORCHRUN_VARIABLES:
            yield "rank", name


def _of_call(call: ast.Call) -> Iterator[Act]:
    """Yield the effects of a call."""
    called = dotted(call.func)
    last = _last(call.func)
    texts = [*map(_text, call.args), "", ""]
    first = texts[0]
    short = called.removeprefix("os.")
    if short in ("getenv", "environ.get") and first in TORCHRUN_VARIABLES:
        yield "rank", first
    elif short in _SETENV and first:
        yield "variable", first
    elif short in _SETS_MANY:
        yield "variable", ""
    elif (
        last in _PARSE
        and not call.args
        and not any(keyword.arg == "args" for keyword in call.keywords)
    ):
        yield "argv", ""
    elif called in _SEEDS:
        yield "seed", ""
    elif last == "init_process_group":
        yield "group", ""
    elif last == "run_line_magic" and first in ("env", "set_env"):
        name = texts[1].replace("=", " ").partition(" ")[0]
        if name and name != texts[1]:
            yield "variable", name


def _last(called: ast.expr) -> str:
    """Return the last name of a called expression: `parse_args` for
    `ArgumentParser().parse_args`.
    """
    return called.attr if isinstance(called, ast.Attribute) else dotted(called)


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the syntax nodes that Python evaluates when it runs a statement.

    For the definition of a function these are only its decorators and defaults.
    """
    yield node
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        defaults = [default for default in node.args.kw_defaults if default is not None]
        children = iter([*node.decorator_list, *node.args.defaults, *defaults])
    elif isinstance(node, ast.Lambda):
        children = iter(node.args.defaults)
    for child in children:
        yield from executed(child)


def dotted(node: ast.AST) -> str:
    """Return a chain of names as text, such as `os.environ.get`; "" for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def _text(node: ast.AST) -> str:
    """Return the text of a constant, "" for anything else."""
    return (
        node.value
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        else ""
    )
