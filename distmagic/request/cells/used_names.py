"""The names that a parsed cell uses without defining them. Pure, from its text."""

from __future__ import annotations

import ast
import builtins
import copy
import symtable
from collections.abc import Iterator

from distmagic.remote.system.gc_pause import parsed
from distmagic.request.cells.cell import CellPlan
from distmagic.request.cells.notebook_effects import names_in


def names_wanted(plan: CellPlan) -> dict[str, int]:
    """Return the names that a cell uses but does not define, with the line of the first use.

    Without built-in names. Empty if it can't be determined (`from x import *`).
    """
    tree = parsed(plan.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            return {}
    wanted = set()
    defined = set(dir(builtins))
    for table in _tables(symtable.symtable(plan.text, "<cell>", "exec")):
        for symbol in table.get_symbols():
            if not symbol.is_global() and table.get_type() != "module":
                continue  # a function's local name
            if symbol.is_referenced():
                wanted.add(symbol.get_name())
            if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                defined.add(symbol.get_name())
    first_line: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            first_line[node.id] = min(node.lineno, first_line.get(node.id, node.lineno))
    missing = sorted(name for name in wanted - defined if not name.startswith("__"))
    return {name: first_line.get(name, 1) for name in missing}


def names_evaluated(plan: CellPlan) -> dict[str, int]:
    """Return the outside names that the call and its targets certainly use, with lines: not those
    after `or`, `if`.
    """
    if plan.call is None:
        return {}
    call = _Certain().visit(copy.deepcopy(plan.call))
    # Includes names that a conditional part may have defined.
    made = {
        node.target.id
        for node in ast.walk(plan.call)
        if isinstance(node, ast.NamedExpr)
    }
    table = symtable.symtable(ast.unparse(call), "<cell>", "eval")
    found = {
        symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()
    } - made
    lines = {
        node.id: node.lineno
        for node in ast.walk(call)
        if isinstance(node, ast.Name) and node.id in found
    }
    for target in plan.targets:  # `runs` of `runs["a"] = train()`
        for name in names_in([parsed(target)]) - {target}:
            lines[name] = plan.call.lineno
    return lines


class _Certain(ast.NodeTransformer):
    """Replaces code that may not be evaluated: both values of a ternary, and operands after the
    first `or`, `and`.
    """

    def visit_IfExp(self, node: ast.IfExp) -> ast.IfExp:
        nothing = ast.Constant(None)
        return ast.IfExp(test=self.visit(node.test), body=nothing, orelse=nothing)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.BoolOp:
        values = [self.visit(node.values[0]), ast.Constant(None)]
        return ast.BoolOp(op=node.op, values=values)


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)
