"""Examines the text of a program before its ranks run it: whether it sets variables, or starts
ranks itself.

Packages read variables on import. If a rank has a package preloaded, variables that the program
sets before the import have no effect. It is unknown which package reads which variable. So a
package may only be preloaded if the program imports it before it sets any variable, except
torchrun's, which no preloaded package reads.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, MappingProxyType

from distmagic.payload.folder import content_of
from distmagic.payload.local_modules import (
    MAX_FILES,
    LocalModule,
    imports_of_statement,
    imports_of_text,
    python_files,
    python_texts,
)
from distmagic.remote.frozen import frozen
from distmagic.remote.system.gc_pause import parsed
from distmagic.remote.system.torchrun_variables import TORCHRUN_VARIABLES
from distmagic.request.cells.notebook_effects import ENVIRON, acts, dotted

# A text without any of these need not be parsed.
_WORDS = re.compile(
    rb"environ\b|putenv|unsetenv|load_dotenv|run_line_magic|spawn|start_processes|notebook_launcher|ddp_"
)
_UNKNOWN = ""  # the name of an import that can't be determined
_IMPORTERS = ("import_module", "__import__")
_MORE_SETTERS = ("load_dotenv", "dotenv.load_dotenv", "os.unsetenv", "unsetenv")
# Attributes of `os.environ` that set nothing by themselves; calls of the last four are looked at.
_METHODS = ("get", "copy", "keys", "values", "items", "setdefault", "pop", "update", "clear")  # fmt: skip
_COPIES = ("dict", "list", "tuple", "set", "sorted", "len", "print", "str", "repr")
_STARTERS = ("spawn", "start_processes")
_STRATEGY = re.compile("ddp_(notebook|spawn|fork)")  # of Lightning
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_OF_TORCH = ("mp", "multiprocessing", "torch.multiprocessing")

# A display name, the text, and the lines of it that ranks run: None for all.
Text = tuple[str, str | bytes, Container[int] | None]


@frozen
class OnRanks:
    """What ranks may, or must not, have loaded when they start."""

    # Modules, and objects in them, that may be preloaded in a rank; None if anything may.
    may_be_loaded: frozenset[str] | None = None
    imports: frozenset[str] = frozenset()  # names that the program imports
    notice: str = ""  # a message for the user


@dataclass
class _Order:
    """The order of imports and settings in texts, identified by number.

    Code in a function runs later, when called.
    """

    # Text, line and name of each import; the line is 0 in a function.
    imports: list[tuple[int, int, str]] = field(default_factory=list)
    # Text and line of each statement that sets a variable, and whether it is in a function.
    settings: list[tuple[int, int, bool]] = field(default_factory=list)
    # {text: the first line at which the text calls something}; an import further down may come
    # after the call.
    calls: dict[int, int] = field(default_factory=dict)

    def note(
        self, text: int, line: int, node: ast.AST, *, is_in_function: bool
    ) -> None:
        """Record the effect of a statement or an expression."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = imports_of_statement(node) or [_UNKNOWN]
            at = 0 if is_in_function else line
            self.imports += [(text, at, name) for name in names]
        if isinstance(node, ast.Call):
            called = dotted(node.func)
            if called.rpartition(".")[2] in _IMPORTERS:
                self.imports.append((text, 0, _UNKNOWN))
            # Functions of Python itself call none of the program's.
            may_set = called.partition(".")[0] not in sys.stdlib_module_names
            if may_set and not is_in_function:
                self.calls[text] = min(line, self.calls.get(text, line))
        if _sets_variable(node):
            self.settings.append((text, line, is_in_function))

    def may_be_loaded(self, first: Iterable[str]) -> frozenset[str] | None:
        """Return the imports before the first variable is set; nothing if more is imported
        later.
        """
        if not self.settings:
            return None
        found = set(first)
        for text, line, name in self.imports:
            before_calls = line < self.calls.get(text, sys.maxsize)
            is_early = line > 0 and all(
                (text == other and line < at) or (is_later and before_calls)
                for other, at, is_later in self.settings
            )
            if is_early and name != _UNKNOWN:
                found.add(name)
        for _, _, name in self.imports:
            is_python = name.partition(".")[0] in sys.stdlib_module_names
            if name not in found and not is_python:
                return frozenset()
        return frozenset(found)


def look(
    texts: Iterable[Text],
    imported: Iterable[str] = (),
    first: Iterable[str] = (),
    names: Mapping[str, str] = MappingProxyType({}),
) -> OnRanks:
    """Examine the texts of a program. Invalid Python is ignored.

    `imported` are other names that the program imports, `first` those imported before any of it
    runs. `names` are those that `other_names` has found.
    """
    notice = ""
    order = _Order()
    imports = set(imported)
    texts = list(texts)
    has_words = any(
        _WORDS.search(text if isinstance(text, bytes) else text.encode())
        for _, text, _ in texts
    )
    for number, (label, text, lines) in enumerate(texts):
        if lines is None:
            imports.update(imports_of_text(text))
        if not has_words and not names:
            continue
        try:
            tree = parsed(text)
        except (SyntaxError, ValueError):
            continue
        _undo_renaming(tree, names)
        waiting: list[tuple[ast.AST, bool]] = [(tree, lines is not None)]
        while waiting:
            node, is_in_function = waiting.pop()
            line = getattr(node, "lineno", 0)
            if lines is None or line in lines:
                order.note(number, line, node, is_in_function=is_in_function)
                notice = notice or _started_by(node, label)
            is_inner = is_in_function or isinstance(node, _FUNCTIONS)
            waiting += [(child, is_inner) for child in ast.iter_child_nodes(node)]
    loaded = order.may_be_loaded(first)
    return OnRanks(may_be_loaded=loaded, notice=notice, imports=frozenset(imports))


def other_names(namespace: Mapping[str, object]) -> dict[str, str]:
    """Return the names by which a notebook has `os` and `os.environ`, other than these two."""
    found = {}
    for name, value in namespace.items():
        if value is os and name != "os":
            found[name] = "os"
        if value is os.environ and name != "environ":
            found[name] = "environ"
    return found


def _undo_renaming(tree: ast.Module, names: Mapping[str, str]) -> None:
    """Write `os` and `environ` where a text has these `names` for them, or imports them `as`
    something else.
    """
    found = dict(names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", "os")
            for alias in node.names:
                is_of_os = module == "os" and alias.name in ("os", "environ", "putenv")
                if is_of_os and alias.asname is not None:
                    found[alias.asname] = alias.name
    if found:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                node.id = found.get(node.id, node.id)


def _started_by(node: ast.AST, label: str) -> str:
    """Return a notice for a call that starts ranks itself, "" for any other.

    They are torch's `mp.spawn`, by its module's usual names or by `nprocs`, accelerate's
    `notebook_launcher`, and those strategies of Lightning that start processes.
    """
    if not isinstance(node, ast.Call):
        return ""
    starter = dotted(node.func)
    before, _, last = starter.rpartition(".")
    given = {one.arg: one.value for one in node.keywords}
    strategy = getattr(given.get("strategy"), "value", None)
    function = ast.unparse(node.args[0]) if node.args else "train"
    if last == "notebook_launcher":
        cure = f"{function}(...)"
    elif isinstance(strategy, str) and _STRATEGY.match(strategy):
        starter, cure = f'strategy="{strategy}"', 'strategy="ddp"'
    elif last in _STARTERS and (before in _OF_TORCH or "nprocs" in given):
        cure = f'{function}(int(os.environ["RANK"]), ...), with int(os.environ["WORLD_SIZE"]) for the number of ranks'
    else:
        return ""
    return (
        f"{label}, line {node.lineno} starts ranks of its own ({starter}). torchrun has started them already, and "
        f"process groups of other processes hang. Write in its place {cure}."
    )


def of_codes(
    codes: Iterable[CodeType], texts: Mapping[str, str], labels: Mapping[str, str]
) -> Iterator[Text]:
    """Yield the texts of cells, with the lines of the functions that are sent."""
    lines: dict[str, set[int]] = {}
    for code in codes:
        found = {line for _, _, line in code.co_lines() if line is not None}
        lines.setdefault(code.co_filename, set()).update(found)
    for name, text in texts.items():
        yield labels.get(name, name), text, lines.get(name, ())


def of_modules(modules: Iterable[LocalModule]) -> Iterator[Text]:
    """Yield the texts of local modules."""
    for module in modules:
        for path, data in python_texts(module):
            yield Path(path).name, data, None


def of_program(start: Path, folder: Path) -> Iterator[Text]:
    """Yield the text of a script, and of the modules that it imports from a folder, in turn.

    Raises `PayloadError`.
    """
    waiting, seen = [start], set[Path]()
    while waiting and len(seen) < MAX_FILES:
        path = waiting.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        data = content_of(path)
        yield path.name, data, None
        for name in imports_of_text(data):
            top = folder / name.partition(".")[0]
            waiting += [top.with_name(f"{top.name}.py"), *python_files(top)]


def _sets_variable(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and dotted(node.func) in _MORE_SETTERS:
        return True
    names = [dotted(child) for child in ast.iter_child_nodes(node)]
    if not _only_reads(node) and any(name in ENVIRON for name in names):
        return True
    return any(
        kind == "variable" and name not in TORCHRUN_VARIABLES
        for kind, name in acts(node)
    )


def _only_reads(node: ast.AST) -> bool:
    """Whether `os.environ` directly in this node is only read, or `acts` finds what it sets.

    Anything else may change it under another name: `env = os.environ`, `patch.dict(os.environ,
    ...)`.
    """
    if isinstance(node, ast.Call):
        return dotted(node.func) in _COPIES
    if isinstance(node, ast.Attribute):
        return node.attr in _METHODS
    if isinstance(node, ast.keyword):
        return node.arg is None  # `**os.environ`
    reading = (
        ast.Subscript, ast.Compare, ast.Dict, ast.BinOp, ast.Expr, ast.For, ast.comprehension,
        ast.FormattedValue,
    )  # fmt: skip
    return isinstance(node, reading)
