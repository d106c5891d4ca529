"""A cell as a program that a person could have written, where its text allows that. Pure.

    the names of the notebook that it uses    as imports, and as plain values
    the cell's statements                     as they are
    the call that it ends with                behind `if __name__ == "__main__":`

Every rank runs all of it, where a cell's own statements run once, in the notebook. So a cell is such a program only if
its statements define, import, or set plain values; one that computes something goes as the pickled call, with the value
that the notebook has.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from distmagic.request.cell import CellPlan, names_wanted

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEFINES = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
)
_LONGEST_VALUE = 2_000  # characters of a value that stands in the program


@dataclass(frozen=True, slots=True)
class NoProgram:
    """Why a cell can't be a program of its own, as the end of a sentence."""

    why: str


def of_cell(plan: CellPlan, namespace: Mapping[str, object]) -> str | NoProgram:
    """Return the text of a program that does what the cell does on every rank; `namespace` is the notebook's."""
    text = plan.text.partition("\n")[2]  # the first line is the magic's
    if "get_ipython()" in plan.text:
        return NoProgram("it has magics of IPython")
    if plan.call is not None:
        for statement in plan.local:
            if not _can_be_repeated(statement):
                return NoProgram(f"line {statement.lineno} is computed in the notebook")
        main = _with_guard(plan, text)
        if isinstance(main, NoProgram):
            return main
        text = main
    head = _head(names_wanted(plan), namespace)
    if isinstance(head, NoProgram):
        return head
    program = "\n".join([*head, "", "", ""]) + text.lstrip("\n") if head else text
    try:
        compile(program, "<program>", "exec", dont_inherit=True)
    except SyntaxError as error:  # `await` outside a function, or `from __future__` that no longer comes first
        return NoProgram(f"it is no program by itself ({error.msg})")
    return program.rstrip("\n") + "\n"


def _can_be_repeated(statement: ast.stmt) -> bool:
    """Whether a statement means on a rank what it means in the notebook, because it only defines or sets something plain."""
    if isinstance(statement, _DEFINES):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)  # a text that explains
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return False
    for node in ast.walk(statement):
        if isinstance(
            node, ast.Call | ast.Await | ast.Subscript | ast.Attribute | ast.NamedExpr
        ):
            return False
    return True


def _with_guard(plan: CellPlan, text: str) -> str | NoProgram:
    """Return the cell's text with its last call behind the guard that lets child processes import the rest."""
    last = ast.parse(plan.text).body[-1]
    assert plan.call is not None
    if isinstance(last, ast.If):
        return text  # it has the guard
    lines = text.split("\n")
    if isinstance(last, ast.Expr | ast.Assign | ast.AnnAssign):
        if plan.local and plan.local[-1].end_lineno == last.lineno:
            return NoProgram("its last line has several statements")
        written = ast.get_source_segment(plan.text, last) or ""
        lines = lines[: last.lineno - 2]  # the text has one line less
        if plan.is_async and isinstance(plan.call, ast.Await):
            written = f"asyncio.run({ast.unparse(plan.call.value)})"
    else:
        written = ast.unparse(
            plan.call
        )  # the cell's only function, which it does not call
        if plan.is_async and isinstance(plan.call, ast.Await):
            written = f"asyncio.run({ast.unparse(plan.call.value)})"
    if plan.is_async:
        lines.insert(0, "import asyncio")
    body = "\n".join(lines).rstrip("\n")
    return f'{body}\n\n\nif __name__ == "__main__":\n    {written}\n'


def _head(
    names: Iterable[str], namespace: Mapping[str, object]
) -> list[str] | NoProgram:
    """Return the lines that give a program what it uses of other cells."""
    imports, values = [], []
    for name in names:
        if name not in namespace:
            return NoProgram(f"nothing defines {name}")
        value = namespace[name]
        found = _import_of(name, value)
        if found:
            imports.append(found)
        elif _is_plain(value) and len(repr(value)) <= _LONGEST_VALUE:
            values.append(f"{name} = {value!r}")
        else:
            return NoProgram(f"{name} is of another cell")
    return [*imports, *([""] if imports and values else []), *values]


def _import_of(name: str, value: object) -> str:
    """Return the statement that imports a value under this name, "" where there is none."""
    if isinstance(value, ModuleType):
        if sys.modules.get(value.__name__) is not value or value.__name__ == "__main__":
            return ""
        if value.__name__ == name:
            return f"import {name}"
        return f"import {value.__name__} as {name}"
    module = getattr(value, "__module__", None)
    inner = getattr(value, "__qualname__", None)
    if (
        not isinstance(module, str)
        or not isinstance(inner, str)
        or module == "__main__"
    ):
        return ""
    if getattr(sys.modules.get(module), inner, None) is not value:
        return ""
    return f"from {module} import {inner}" + ("" if inner == name else f" as {name}")


def _is_plain(value: object) -> bool:
    """Whether the text of a value is a program's way to make an equal one."""
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value)) and bool(value)  # type: ignore[call-overload]
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if type(value) is float:
        return value == value and abs(value) != float("inf")  # noqa: PLR0124 - nan
    return type(value) in _PLAIN
