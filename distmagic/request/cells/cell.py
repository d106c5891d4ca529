"""Parses a cell's text: statements for the notebook, and an expression for every rank.

Pure, with `ast` only.

    text --parse_cell--> CellPlan --make_thunk--> a function without arguments

All statements except the last run in the notebook; every rank executes the last expression,
including its arguments. The input is the visible cell with its first line, the magic, as a comment.
So line numbers on the notebook machine and on hosts are those that the user sees.
"""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import replace

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.remote.system.gc_pause import parsed, parsed_expression
from distmagic.remote.values.reductions.source_form import code_of_call
from distmagic.request.cells.notebook_effects import executed, names_in, targets_of

_MAGIC = re.compile(r"\s*[%!]|[\w\s,]+=\s*[%!]|.*\?\s*$")
_BLOCKS = {
    "For": "a for loop",
    "AsyncFor": "a for loop",
    "While": "a while loop",
    "If": "an if block",
    "With": "a with block",
    "AsyncWith": "a with block",
    "Try": "a try block",
    "TryStar": "a try block",
    "Match": "a match block",
}
_LAST_HINT = "Every rank executes the cell's last expression: end the cell with a call, such as {call}."
_IPYTHON_HINT = "Take it out, or run it in a cell of its own."
# The user's text for these calls.
_WRITTEN = {"run_line_magic": "%{} {}", "system": "!{}", "getoutput": "!{}"}
_SHORT_CHARS = 60
_TARGETS = (ast.Name, ast.Attribute, ast.Subscript)
_SHOW = ("print", "display")
# Calls that only look at values, or at a clock.
_LOOKS = {
    *_SHOW,
    *("abs", "all", "any", "bool", "dict", "enumerate", "float", "format", "int"),
    *("isinstance", "len", "list", "max", "min", "range", "repr", "reversed", "round"),
    *("set", "sorted", "str", "sum", "tuple", "type", "vars", "zip"),
    *("time", "time.time", "time.monotonic", "monotonic"),
    *("time.perf_counter", "perf_counter"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@frozen
class CellPlan:
    """A parsed cell."""

    text: str  # the whole cell
    filename: str = "<cell>"  # its name in tracebacks
    local: tuple[ast.stmt, ...] = ()  # statements for the notebook
    # the expression for every rank; None: nothing runs in the notebook, and `text` is every rank's
    # program
    call: ast.expr | None = None
    # the left side of `run = train()` or `runs["a"] = train()`: it gets the run, because each rank
    # has its own value
    targets: tuple[str, ...] = ()
    is_async: bool = False  # `call` uses await


def parse_cell(text: str, *, whole: bool, filename: str = "<cell>") -> CellPlan:
    """Return the parsed cell; with `whole`, all of it runs on every rank.

    Raises `SyntaxError` with `filename` and the line, and `UsageError`, which suggests what to
    write.
    """
    tree = _parse(text, filename, whole=whole)
    if not tree.body:
        raise UsageError(
            "The cell is empty.",
            "Define a function under the magic's line, and call it at the end.",
        )
    plan = CellPlan(text=text, filename=filename)
    if whole:
        return _whole(plan, tree)
    body = _without_guard(tree.body)
    _reject_look(text, body)
    found = _final_call(text, body[-1])
    if found is not None:
        return _call_plan(plan, body[:-1], *found)
    functions = {node.name: node for node in body if isinstance(node, Function)}
    # Reject a last statement that is neither a call nor replaceable by one.
    last = body[-1]
    call = f"{next(reversed(functions), 'train')}()"
    hint = _LAST_HINT.format(call=call)
    if isinstance(last, ast.Expr):
        _reject_ipython(last)
        raise UsageError(
            f"line {last.lineno}: {_written(text, last.value)} calls nothing.", hint
        )
    block = _BLOCKS.get(type(last).__name__)
    if functions and block:
        raise UsageError(
            f"line {last.lineno}: the cell ends with {block}, not with a call.",
            f"Put the block into a function and end the cell with its call, such as {call}; "
            "or write %%distributed --whole, and every rank runs the whole cell.",
        )
    if not functions and isinstance(last, ast.ClassDef | ast.Import | ast.ImportFrom):
        raise UsageError(
            f"line {last.lineno}: the cell has no function and no call, so there is nothing to run.",
            hint,
        )
    if not functions:
        return _whole(plan, tree)
    return _call_plan(plan, body, _call_of_only(list(functions.values())), ())


def _parse(text: str, filename: str, *, whole: bool) -> ast.Module:
    try:
        return parsed(text, filename)
    except SyntaxError as error:
        line = text.splitlines()[(error.lineno or 1) - 1 :][:1]
        if whole and line and _MAGIC.match(line[0]):
            raise _ipython_only(error.lineno or 1, line[0].strip()) from None
        raise
    except ValueError as error:  # a null byte, before Python 3.12
        raise UsageError(f"The cell can't be read: {error}.") from None


def _ipython_only(lineno: int, line: str) -> UsageError:
    return UsageError(
        f"line {lineno}: {_short(line)} is IPython's, and ranks run plain Python.",
        _IPYTHON_HINT,
    )


def _short(source: str) -> str:
    source = " ".join(source.split())
    if len(source) > _SHORT_CHARS:
        source = source[: _SHORT_CHARS - 3] + "..."
    return f"`{source}`"


def _written(text: str, node: ast.AST) -> str:
    """Return the source of a statement or an expression; `ast.unparse` would reformat it."""
    return _short(ast.get_source_segment(text, node) or ast.unparse(node))


def _whole(plan: CellPlan, tree: ast.Module) -> CellPlan:
    # This finds a `return` outside of a function before ranks do.
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    compile(tree, plan.filename, "exec", flags=flags, dont_inherit=True)
    _reject_ipython(tree)
    return plan


def _reject_ipython(tree: ast.AST) -> None:
    """Reject calls that IPython made from its own syntax, because ranks have no IPython."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Call(func=ast.Name(id="get_ipython")), attr=method
                )
            ):
                words = [
                    str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)
                ]
                written = _WRITTEN.get(method, "{}").format(*words, "", "").strip()
                raise _ipython_only(
                    node.lineno, written if method in _WRITTEN else ast.unparse(node)
                )


def _without_guard(body: list[ast.stmt]) -> list[ast.stmt]:
    """Unwrap a trailing `if __name__ == "__main__":`, which is always true in a notebook."""
    last = body[-1]
    guards = ("__name__ == '__main__'", "'__main__' == __name__")
    if (
        isinstance(last, ast.If)
        and not last.orelse
        and ast.unparse(last.test) in guards
    ):
        return [*body[:-1], *last.body]
    return body


def _final_call(text: str, last: ast.stmt) -> tuple[ast.expr, tuple[str, ...]] | None:
    """Return the expression and its assignment targets, or None if the cell does not end with a
    call.
    """
    if not isinstance(last, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign):
        return None
    value = last.value
    if value is None or not _calls(value):
        return None
    _reject_ipython(last)
    if isinstance(last, ast.Expr):
        return value, ()
    targets = targets_of(last)
    if isinstance(last, ast.AugAssign) or not all(
        isinstance(target, _TARGETS) for target in targets
    ):
        raise UsageError(
            f"line {last.lineno}: {_written(text, last)} can't take the value apart: every rank returns one of its own.",
            f"Write run = {ast.unparse(value)} and look at run.results[0].",
        )
    return value, tuple(map(ast.unparse, targets))


def _reject_look(text: str, body: list[ast.stmt]) -> None:
    """Reject a last line that only reads the result of an earlier call, as in `run = train()`,
    `print(run)`.

    Otherwise the notebook would execute the call, and every rank only the last line.
    """
    *before, last = body
    statement = _called_before(before, last) or _looked_at(before, last)
    if statement is None:
        return
    look, call = _written(text, last), _written(text, statement)
    raise UsageError(
        f"line {last.lineno}: every rank would execute {look} alone, and {call} would run in the "
        "notebook; nothing has run.",
        f"End the cell with {call}, and write {look} in the next cell; "
        "or write %%distributed --whole, and every rank runs the whole cell.",
    )


def _called_before(before: list[ast.stmt], last: ast.stmt) -> ast.stmt | None:
    """Return a call of the cell's own function before a last line such as `print("done")` or
    `print(time.time() - t)`.

    None if the last line calls or names anything that may be meant for ranks.
    """
    value = getattr(before[-1], "value", None) if before else None
    functions = {node.name for node in before if isinstance(node, Function)}
    if not isinstance(value, ast.Call) or ast.unparse(value.func) not in functions:
        return None
    if not isinstance(last, ast.Expr | ast.Assign | ast.AnnAssign):
        return None
    calls = [node for node in ast.walk(last) if isinstance(node, ast.Call)]
    called = {ast.unparse(call.func) for call in calls}
    if not called or called - _LOOKS or names_in([last]) & functions:
        return None
    return before[-1]


def _looked_at(before: list[ast.stmt], last: ast.stmt) -> ast.stmt | None:
    """Return the statement whose call has stored what the last line only reads; None for any other
    last line.
    """
    if not isinstance(last, ast.Expr):
        return None
    look = last.value
    shown: Sequence[ast.expr] = [look]
    if isinstance(look, ast.Call):
        if not isinstance(look.func, ast.Name) or look.func.id not in _SHOW:
            return None
        shown = look.args
    if any(map(_calls, shown)):
        return None
    names = names_in([look])
    for statement in reversed(before):
        value = getattr(statement, "value", None)
        if value and _calls(value) and names & names_in(targets_of(statement)):
            return statement
    return None


def _calls(node: ast.AST) -> bool:
    """Whether evaluating `node` calls something; the body of a lambda does not count, because it
    only defines.
    """
    return any(isinstance(one, ast.Call | ast.Await) for one in executed(node))


def _call_plan(
    plan: CellPlan, local: list[ast.stmt], call: ast.expr, targets: tuple[str, ...]
) -> CellPlan:
    for statement in local:
        if _awaits(statement, plan.filename):
            raise UsageError(
                f"line {statement.lineno}: await can only be in the cell's last expression.",
                "Run this statement in a cell of its own, before this one.",
            )
    is_async = _awaits(ast.copy_location(ast.Expr(call), call), plan.filename)
    return replace(
        plan, local=tuple(local), call=call, targets=targets, is_async=is_async
    )


def _awaits(statement: ast.stmt, filename: str) -> bool:
    """Whether `statement` needs an event loop.

    Raises `SyntaxError` for a statement that is invalid outside of a function.
    """
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(
        ast.Module([statement], []), filename, "exec", flags=flags, dont_inherit=True
    )
    return bool(code.co_flags & inspect.CO_COROUTINE)


def _call_of_only(functions: list[Function]) -> ast.expr:
    """Return the call of the cell's only function, which must need no argument."""
    *others, function = functions
    awaited = "await " if isinstance(function, ast.AsyncFunctionDef) else ""
    if others:
        raise UsageError(
            f"The cell defines {len(functions)} functions, and calls none of them.",
            _LAST_HINT.format(call=f"{awaited}{function.name}()"),
        )
    args = function.args
    # Defaults belong to the last parameters.
    needed = [*args.posonlyargs, *args.args]
    needed = needed[: len(needed) - len(args.defaults)]
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        if default is None:
            needed.append(arg)
    if needed:
        names = ", ".join(arg.arg for arg in needed)
        raise UsageError(
            f"line {function.lineno}: {function.name} needs {names}, and the cell does not call it.",
            f"End the cell with {awaited}{function.name}(...).",
        )
    call = parsed_expression(f"{awaited}{function.name}()")
    ast.increment_lineno(call, function.lineno - 1)
    return call


def make_thunk(
    plan: CellPlan, namespace: dict[str, object], filename: str, flags: int = 0
) -> Callable[[], object]:
    """Return `plan.call` as a function without arguments whose globals are `namespace`.

    Its code has the cell's `filename` and line numbers, and is called `<module>` in tracebacks. A
    call with await gives a coroutine function. `flags` are compiler flags (the notebook's `from
    __future__`).
    """
    if plan.call is None:
        raise ValueError("a cell that runs as a whole has no call")
    code = code_of_call(plan.call, filename, flags, is_async=plan.is_async)
    return types.FunctionType(code, namespace, "cell")
