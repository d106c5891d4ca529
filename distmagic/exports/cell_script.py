"""Turns a cell into a readable program, if its text allows that. Pure.

    the names of the notebook that it uses    as imports, plain values, functions and classes
    the cell's statements                     as they are
    the call that it ends with                after `if __name__ == "__main__":`

Every rank runs the whole program, while a cell's own statements run once, in the notebook. So a
cell becomes such a program only if its statements define, import, or set plain values. One that
computes something is exported as the pickled call, with the notebook's values.
"""

from __future__ import annotations

import ast
import cmath
import symtable
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType

from distmagic.errors import UsageError
from distmagic.remote.system.gc_pause import parsed
from distmagic.remote.values.by_name import is_secret
from distmagic.request.cells.cell import CellPlan
from distmagic.request.cells.notebook_effects import names_in
from distmagic.request.cells.used_names import names_wanted

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DEFINES = (*_DEFINITIONS, ast.Import, ast.ImportFrom)
_Binding = ast.stmt | ast.expr  # what gives a name its value
_LONGEST_VALUE = 2_000  # characters of a value in the program


class NoProgram(Exception):
    """The cell can't be a separate program; `why` is the end of a sentence."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def of_cell(
    plan: CellPlan, namespace: Mapping[str, object], texts: Mapping[str, str]
) -> str:
    """Return the text of a program that does on every rank what the cell does.

    `namespace` is the notebook's, `texts` are its cells by file name, in the order of their
    execution. Raises `NoProgram`, and `UsageError` for a secret in it.
    """
    text = plan.text.partition("\n")[2]  # the first line is the magic's
    if "get_ipython" in names_in([parsed(plan.text)]):
        raise NoProgram("it has magics of IPython")
    if plan.call is not None:
        for statement in plan.local:
            if not _can_be_repeated(statement):
                raise NoProgram(f"line {statement.lineno} is computed in the notebook")
        text = _with_guard(plan, text)
    head = _Head(namespace=namespace, texts=texts, own=_names_of(text))
    head.add(names_wanted(plan))
    if "display" not in namespace and "display(" in text + head.text():
        head.values["display"] = "display = print  # a notebook has it from the start"
    before = head.text()
    program = f"{before}\n\n\n" + text.lstrip("\n") if before else text
    try:
        compile(program, "<program>", "exec", dont_inherit=True)
    except SyntaxError as error:
        # `await` outside a function, or `from __future__` that no longer comes first
        raise NoProgram(f"it is not a program by itself ({error.msg})") from None
    return program.rstrip("\n") + "\n"


def _names_of(text: str) -> frozenset[str]:
    """Return the names that a program assigns outside of functions and classes."""
    try:
        table = symtable.symtable(text, "<cell>", "exec")
    except SyntaxError:  # `await` outside a function
        return frozenset()
    return frozenset(
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    )


def _can_be_repeated(statement: ast.stmt) -> bool:
    """Whether a statement has the same meaning on a rank, because it only defines or sets a plain
    value.
    """
    if isinstance(statement, _DEFINES):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)  # a docstring
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return False
    for node in ast.walk(statement):
        if isinstance(
            node, ast.Call | ast.Await | ast.Subscript | ast.Attribute | ast.NamedExpr
        ):
            return False
    return True


def _with_guard(plan: CellPlan, text: str) -> str:
    """Return the cell's text with a guard before its last call, so that child processes can import
    the rest.
    """
    last = parsed(plan.text).body[-1]
    assert plan.call is not None
    if isinstance(last, ast.If):
        return text  # it has the guard already
    lines = text.split("\n")
    written = ast.unparse(plan.call)
    if isinstance(last, ast.Expr | ast.Assign | ast.AnnAssign):
        if plan.local and plan.local[-1].end_lineno == last.lineno:
            raise NoProgram("its last line has several statements")
        written = ast.get_source_segment(plan.text, last) or ""
        lines = lines[: last.lineno - 2]  # the text has one line less
    # Otherwise it is the cell's only function, without a call.
    if plan.is_async:
        if isinstance(plan.call, ast.Await):
            written = f"asyncio.run({ast.unparse(plan.call.value)})"
        lines.insert(0, "import asyncio")
    body = "\n".join(lines).rstrip("\n")
    return f'{body}\n\n\nif __name__ == "__main__":\n    {written}\n'


@dataclass(kw_only=True)
class _Head:
    """The lines before the cell's own text: imports, plain values and definitions from other
    cells.
    """

    namespace: Mapping[str, object]
    texts: Mapping[str, str]
    # Names that the cell's text assigns: a definition before it may use them, too.
    own: frozenset[str]
    imports: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    definitions: dict[str, str] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)

    def add(self, names: Iterable[str]) -> None:
        """Add these names, and the names that they need."""
        for name in names:
            if name in self.imports or name in self.values or name in self.waiting:
                continue
            if name in self.own and name not in self.namespace:
                continue
            if name not in self.namespace:
                raise NoProgram(f"nothing defines {name}")
            self._add_value(name, self.namespace[name])

    def _add_value(self, name: str, value: object) -> None:
        statement = _import_of(name, value)
        if statement:
            self.imports[name] = statement
            return
        if isinstance(value, str | bytes) and is_secret(name):
            raise UsageError(
                f"{name} looks like a secret, and would stand in the exported program.",
                f"Give it with --env {name}=..., and read os.environ[{name!r}] in the function.",
            )
        if _is_plain(value) and len(repr(value)) <= _LONGEST_VALUE:
            self.values[name] = f"{name} = {value!r}"
            return
        definition = _definition_of(name, value, self.texts)
        if not definition:
            raise NoProgram(f"{name} is of another cell")
        # Its dependencies come before it: a base class is needed for the definition.
        self.waiting.add(name)
        self.add(names_wanted(CellPlan(text=definition)))
        self.definitions[name] = definition

    def text(self) -> str:
        """Return these lines as the start of a program, "" if there are none."""
        parts = []
        for lines in (sorted(self.imports.values()), self.values.values()):
            if lines:
                parts.append("\n".join(lines))
        head = "\n\n".join(parts)
        blocks = [*([head] if head else []), *self.definitions.values()]
        return "\n\n\n".join(blocks)


def _definition_of(name: str, value: object, texts: Mapping[str, str]) -> str:
    """Return the lines that define a function or a class in a cell, "" if there are none.

    Raises `NoProgram`.
    """
    if (
        getattr(value, "__module__", None) != "__main__"
        or getattr(value, "__name__", None) != name
    ):
        return ""
    if isinstance(value, FunctionType):
        code = value.__code__
        text = texts.get(code.co_filename, "")
        for node in _bindings(name, text):
            if _first_line(node) == code.co_firstlineno:
                return _lines_of(name, node, text)
    elif not isinstance(value, type):
        return ""
    # A class, or a function that a decorator has made: the last definition counts.
    for text in reversed(list(texts.values())):
        found = _bindings(name, text)
        if found:
            return _lines_of(name, found[-1], text)
    return ""


def _bindings(name: str, text: str) -> list[_Binding]:
    """Return all definitions and assignments of a global name in a cell, in the order of its
    lines.
    """
    try:
        waiting: list[ast.AST] = [parsed(text)]
    except SyntaxError:
        return []
    found: list[_Binding] = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, _DEFINITIONS):
            if node.name == name:
                found.append(node)
            continue
        if (
            isinstance(node, ast.Name)
            and node.id == name
            and isinstance(node.ctx, ast.Store)
        ):
            found.append(node)
        waiting += ast.iter_child_nodes(node)
    return sorted(found, key=_first_line)


def _first_line(node: _Binding) -> int:
    """Return the line of a statement, or of its first decorator."""
    decorators = node.decorator_list if isinstance(node, _DEFINITIONS) else []
    return min(one.lineno for one in [node, *decorators])


def _lines_of(name: str, node: _Binding, text: str) -> str:
    """Return the lines of a definition. Raises `NoProgram` unless it is a statement of its own."""
    if not isinstance(node, _DEFINITIONS) or node.col_offset:
        raise NoProgram(f"{name} is defined inside another block, or by an assignment")
    return "\n".join(text.split("\n")[_first_line(node) - 1 : node.end_lineno])


def _import_of(name: str, value: object) -> str:
    """Return the statement that imports a value under this name, "" if there is none."""
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
    """Whether a value can be recreated from its repr in a program."""
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value)) and bool(value)  # type: ignore[call-overload]
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if type(value) in (float, complex):
        return cmath.isfinite(value)  # type: ignore[arg-type]
    return type(value) in _PLAIN
