"""Which of a notebook's own statements act there alone, where a program under torchrun would have them on every rank.

A program that was pasted into a cell reads its rank, parses its arguments, seeds and sets variables at its top. There it
runs in the notebook, which is no rank. A cell may also change a library, by its settings, its registrations or its
attributes: ranks import it anew. Pure, from the syntax tree: what stands inside a function runs on the ranks, and is not
looked at.
"""

from __future__ import annotations

import ast
import logging
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Literal

from distmagic.remote.system.torchrun_variables import TORCHRUN_VARIABLES

CURE = "Move it into the function, or write %%distributed --whole, and every rank runs the whole cell."
_CURE_OF_SEVERAL = "Move them into the function, or write %%distributed --whole, and every rank runs the whole cell."
_CURE_OF_LIBRARIES = "Ranks import libraries anew: do it inside the function, too."
_CURE_OF_VARIABLES = "Ranks get variables by --env NAME=VALUE."
_NAMED_AT_MOST = 4

ENVIRON = ("os.environ", "environ")
_GETENV = ("os.getenv", "getenv", "os.environ.get", "environ.get")
_SETENV = (
    "os.putenv",
    "putenv",
    "os.environ.setdefault",
    "environ.setdefault",
    "os.environ.pop",
    "environ.pop",
)
_SETENV_MANY = ("os.environ.update", "environ.update")
_PARSE = ("parse_args", "parse_known_args", "parse_args_into_dataclasses")
_SEEDS = {
    "random.seed", "np.random.seed", "numpy.random.seed", "torch.manual_seed", "manual_seed", "torch.random.manual_seed",
    "torch.cuda.manual_seed", "torch.cuda.manual_seed_all", "set_seed", "transformers.set_seed", "accelerate.utils.set_seed",
    "seed_everything", "pl.seed_everything", "L.seed_everything", "lightning.seed_everything",
}  # fmt: skip

# How functions are called by which libraries are set, or are given something to keep.
_CHANGES = re.compile(
    r"_?(set|register|unregister|add|use|enable|disable|(manual_)?seed|filter|simplefilter|basic|dictConfig|capture)"
)
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
# What is done: its kind, in words, and the environment variable.
Act = tuple[Kind, str, str]
_READS_ARGV: Act = (
    "argv",
    "reads the command line of the notebook, not of a rank",
    "",
)
_SETS_ARGV: Act = ("sets argv", "sets sys.argv of the notebook, not of the ranks", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEffect:
    """Something that a statement of the notebook does: in words, `line 4 reads LOCAL_RANK of the notebook, not of a rank`.

    `lines` are those of the whole statement. `name` is that of an environment variable, "" where there is none.
    """

    kind: Kind
    lineno: int
    lines: range
    words: str
    name: str = ""


def local_effects(
    statements: Sequence[ast.stmt], given: Collection[str] = ()
) -> tuple[LocalEffect, ...]:
    """Return what these statements do in the notebook alone, in order. `given` are variables that the ranks get anyway.

    A seed counts only where no later statement makes something of it here: data that is drawn here travels to the ranks.
    """
    found: list[LocalEffect] = []
    for index, statement in enumerate(statements):
        effects = list(_of_statement(statement))
        if any(_computes(later) for later in statements[index:]):
            effects = [effect for effect in effects if effect.kind != "seed"]
        for effect in effects:
            # Read by this package, in the notebook.
            is_ours = effect.name.startswith("DISTMAGIC_")
            if not is_ours and (not effect.name or effect.name not in given):
                found.append(effect)
    return tuple(_without_own_argv(found))


def library_changes(
    text: str, label: str, namespace: Mapping[str, object]
) -> Iterator[LocalEffect]:
    """Yield where a cell's text changes a library; `name` is that of the library. `namespace` are the notebook's values."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for statement in tree.body:
        lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        for node in executed(statement):
            for target, does in _changed(node):
                library = _library(target, namespace)
                if library and library not in _NOT_OF_A_LIBRARY:
                    lineno = target.lineno
                    where = f"{label}, line {lineno}" if label else f"line {lineno}"
                    yield LocalEffect(
                        kind="library",
                        lineno=lineno,
                        lines=lines,
                        words=f"{where} {does} in the notebook, not on the ranks",
                        name=library,
                    )


def _changed(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield what a node sets or calls by which a library may be changed, and that in words."""
    targets: Sequence[ast.expr] = ()
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called, args = node.value.func, node.value.args
        name = called.attr if isinstance(called, ast.Attribute) else dotted(called)
        if name == "setattr" and args:
            yield args[0], f"sets an attribute of {ast.unparse(args[0])}"
        elif _CHANGES.match(name):
            yield called, f"calls {ast.unparse(called)}"
    for target in targets:
        if isinstance(target, ast.Attribute | ast.Subscript):
            yield target, f"sets {ast.unparse(target)}"


def _library(target: ast.expr, namespace: Mapping[str, object]) -> str:
    """Return the library that an expression begins at, "" where that is a value of the notebook's own."""
    root = target
    while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
        root = root.func if isinstance(root, ast.Call) else root.value
    value = namespace.get(root.id) if isinstance(root, ast.Name) else None
    found: object = None
    if isinstance(value, ModuleType):
        found = value.__name__
    elif isinstance(value, logging.Logger):
        found = "logging"
    elif isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        found = value.__module__
    else:
        # One object of a library, such as a registry or matplotlib's rcParams, that the library itself keeps.
        module = sys.modules.get(type(value).__module__)
        kept = () if module is None else vars(module).values()
        if any(value is one for one in kept):
            found = type(value).__module__
    return found.partition(".")[0] if isinstance(found, str) else ""


def note(effects: Sequence[LocalEffect]) -> str:
    """Return all of it in one paragraph, "" for nothing."""
    if not effects:
        return ""
    words = [effect.words for effect in effects[:_NAMED_AT_MOST]]
    if len(effects) > _NAMED_AT_MOST:
        words.append(f"and {len(effects) - _NAMED_AT_MOST} more")
    cure = CURE if len(effects) == 1 else _CURE_OF_SEVERAL
    if all(effect.kind == "library" for effect in effects):
        cure = _CURE_OF_LIBRARIES
    if any(effect.kind == "variable" for effect in effects):
        cure += f" {_CURE_OF_VARIABLES}"
    sentence = "; ".join(words)
    return f"{sentence[0].upper()}{sentence[1:]}. {cure}"


def _without_own_argv(effects: Sequence[LocalEffect]) -> list[LocalEffect]:
    """Leave out a command line that the cell itself has written and then parses: its arguments travel as values."""
    kinds = [effect.kind for effect in effects]
    if "sets argv" in kinds and "argv" in kinds[kinds.index("sets argv") :]:
        return [
            effect for effect in effects if effect.kind not in ("argv", "sets argv")
        ]
    return list(effects)


def _computes(statement: ast.stmt) -> bool:
    """Whether a statement calls something here that may draw random numbers: anything but seeds and definitions."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    calls = [node for node in executed(statement) if isinstance(node, ast.Call)]
    return any(dotted(call.func) not in _SEEDS for call in calls)


def _of_statement(statement: ast.stmt) -> Iterator[LocalEffect]:
    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    assigned = {id(node) for target in targets for node in ast.walk(target)}
    for node in executed(statement):
        found = acts(node)
        if isinstance(node, ast.Attribute) and dotted(node) == "sys.argv":
            found = [_SETS_ARGV if id(node) in assigned else _READS_ARGV]
        for kind, does, name in found:
            lineno = getattr(node, "lineno", statement.lineno)
            yield LocalEffect(
                kind=kind,
                lineno=lineno,
                lines=lines,
                words=f"line {lineno} {does}",
                name=name,
            )


def acts(node: ast.AST) -> Iterable[Act]:
    """Return what this node by itself does when it is evaluated: its kind, in words, and the environment variable."""
    if isinstance(node, ast.Subscript | ast.Compare):
        return _of_environ(node)
    if isinstance(node, ast.Call):
        return _of_call(node)
    if isinstance(node, ast.AugAssign) and dotted(node.target) in ENVIRON:
        return [("variable", _sets(""), "")]
    return []


def _of_environ(node: ast.Subscript | ast.Compare) -> Iterator[Act]:
    """Yield what `os.environ[...]`, read or written, and `... in os.environ` do."""
    environ, key = (
        (node.value, node.slice)
        if isinstance(node, ast.Subscript)
        else (node.comparators[-1], node.left)
    )
    name = _text(key)
    if dotted(environ) not in ENVIRON:
        return
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        yield "variable", _sets(name), name
    elif name in TORCHRUN_VARIABLES:
        yield "rank", _reads(name), name


def _of_call(call: ast.Call) -> Iterator[Act]:
    """Yield what a call does."""
    called = dotted(call.func)
    last = call.func.attr if isinstance(call.func, ast.Attribute) else called
    first = _text(call.args[0]) if call.args else ""
    if called in _GETENV and first in TORCHRUN_VARIABLES:
        yield "rank", _reads(first), first
    elif called in _SETENV and first:
        yield "variable", _sets(first), first
    elif called in _SETENV_MANY:
        yield "variable", _sets(""), ""
    elif (
        last in _PARSE
        and not call.args
        and not any(keyword.arg == "args" for keyword in call.keywords)
    ):
        yield _READS_ARGV
    elif called in _SEEDS:
        yield "seed", "seeds the notebook, not the ranks", ""
    elif last == "init_process_group":
        yield "group", "makes a process group in the notebook, which is no rank", ""
    elif (
        last == "run_line_magic" and first in ("env", "set_env") and len(call.args) > 1
    ):
        name = _text(call.args[1]).replace("=", " ").split(" ")[0]
        if name and name != _text(call.args[1]):
            yield "variable", _sets(name), name


def _reads(name: str) -> str:
    return f"reads {name} of the notebook, not of a rank"


def _sets(name: str) -> str:
    return f"sets {name or 'variables'} in the notebook, not on the ranks"


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that are evaluated when a statement runs: of a function only its decorators and defaults."""
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
    """Return `os.environ.get` for such a chain of names, "" for any other expression."""
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
