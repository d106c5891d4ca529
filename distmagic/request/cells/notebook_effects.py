"""Finds statements that only affect the notebook, although under torchrun they would affect every
rank.

A program that was pasted into a cell reads its rank, parses arguments, sets seeds and variables at
its top. In a cell, these lines run in the notebook, which is no rank. Pure, from the
syntax tree. Code inside functions runs on the ranks, and is not examined. library_changes.py finds
changes of libraries.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
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

ENVIRON = ("os.environ", "environ")
# Without a leading `os.`.
_SETENV = ("putenv", "unsetenv", "environ.setdefault", "environ.pop")
_SETS_MANY = ("environ.update", "environ.clear", "load_dotenv", "dotenv.load_dotenv")
_SETS_LIST = ("append", "extend", "insert", "pop", "remove", "clear")
_PARSE = ("parse_args", "parse_known_args", "parse_args_into_dataclasses")
SEEDS = {
    "random.seed", "np.random.seed", "numpy.random.seed", "torch.manual_seed", "manual_seed", "torch.random.manual_seed",
    "torch.cuda.manual_seed", "torch.cuda.manual_seed_all", "set_seed", "transformers.set_seed", "accelerate.utils.set_seed",
    "seed_everything", "pl.seed_everything", "L.seed_everything", "lightning.seed_everything",
}  # fmt: skip

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


def local_effects(
    statements: Sequence[ast.stmt], given: Collection[str] = ()
) -> tuple[LocalEffect, ...]:
    """Return the effects of these statements on the notebook only, in order.

    `given` are variables that ranks get anyway. A seed only counts if no later statement uses it in
    the notebook: data that is drawn in the notebook is sent to the ranks.
    """
    found = []
    for index, statement in enumerate(statements):
        is_data = any(computes(later) for later in statements[index:])
        for effect in _of_statement(statement):
            is_given = effect.name in given or effect.name.startswith("DISTMAGIC_")
            if not is_given and not (is_data and effect.kind == "seed"):
                found.append(effect)
    # A command line that the cell itself writes and then parses: its arguments are sent as values.
    kinds = [effect.kind for effect in found]
    if "sets argv" in kinds and "argv" in kinds[kinds.index("sets argv") :]:
        found = [one for one in found if one.kind not in ("argv", "sets argv")]
    return tuple(found)


def targets_of(node: ast.AST) -> list[ast.expr]:
    """Return the targets that a statement sets or deletes."""
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    return []


def names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Return all names that these nodes have."""
    parts = (part for node in nodes for part in ast.walk(node))
    return {part.id for part in parts if isinstance(part, ast.Name)}


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


def computes(statement: ast.stmt) -> bool:
    """Whether a statement calls something that may draw random numbers: anything except seeds and
    definitions.
    """
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    calls = [node for node in executed(statement) if isinstance(node, ast.Call)]
    return any(dotted(call.func) not in SEEDS for call in calls)


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
    targets = targets_of(node)
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
    last = last_name(call.func)
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
    elif called in SEEDS:
        yield "seed", ""
    elif last == "init_process_group":
        yield "group", ""
    elif last == "run_line_magic" and first in ("env", "set_env"):
        name = texts[1].replace("=", " ").partition(" ")[0]
        if name and name != texts[1]:
            yield "variable", name


def last_name(called: ast.expr) -> str:
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
