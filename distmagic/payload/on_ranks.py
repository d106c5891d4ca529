"""What the text of a program shows before its ranks run it: that it sets variables, or starts ranks of its own.

Packages read variables when they are imported. A process that has them loaded already would ignore what the program sets
before it imports them. Which package reads which variable nobody knows. So a package may be loaded when ranks begin only
where the program imports it before it sets any variable, but for those of torchrun, which no package reads that is kept
loaded.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from distmagic.payload.local_modules import (
    MAX_FILES,
    LocalModule,
    imports_of_statement,
    imports_of_text,
    python_files,
    python_texts,
)
from distmagic.remote.system.torchrun_variables import TORCHRUN_VARIABLES
from distmagic.request.notebook_effects import ENVIRON, acts, dotted

# Without one of these a text need not be parsed.
_WORDS = re.compile(
    rb"environ\b|putenv|unsetenv|load_dotenv|run_line_magic|spawn|start_processes"
)
_UNKNOWN = ""  # the name of an import that its text doesn't show
_IMPORTERS = ("import_module", "__import__")
_MORE_SETTERS = ("load_dotenv", "dotenv.load_dotenv", "os.unsetenv", "unsetenv")
_STARTERS = ("spawn", "start_processes")
_OF_TORCH = ("mp", "multiprocessing", "torch.multiprocessing")

# A name for the user, the text, and the lines of it that ranks run: None for all.
Text = tuple[str, str | bytes, Container[int] | None]


@dataclass(frozen=True, kw_only=True)
class OnRanks:
    """What ranks need to have, or not to have, when they begin.

    may_be_loaded: modules, and what is in them, which a rank may find loaded; None where it may find anything
    imports: names of what the program imports
    notice: for the user
    """

    may_be_loaded: frozenset[str] | None = None
    imports: frozenset[str] = frozenset()
    notice: str = ""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where something happens: the number of a text, the line, and whether a function does it, which is called later."""

    text: int
    line: int
    is_in_function: bool


@dataclass
class _Order:
    """What texts do: the places of imports, with their names, and of statements that set variables.

    calls: {text: the first line at which the text itself calls something}; an import further down may come after the call
    """

    imports: list[tuple[_Place, str]] = field(default_factory=list)
    settings: list[_Place] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=dict)


def look(
    texts: Iterable[Text], imported: Iterable[str] = (), first: Iterable[str] = ()
) -> OnRanks:
    """Look through the texts of a program. One that is no Python shows nothing.

    `imported` names what the program imports beside that, `first` what is imported before any of it runs.
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
        if not has_words:
            continue
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for node, is_in_function in _walk(tree, is_in_function=lines is not None):
            line = getattr(node, "lineno", 0)
            if lines is None or line in lines:
                place = _Place(text=number, line=line, is_in_function=is_in_function)
                _note(order, place, node)
                if not notice and isinstance(node, ast.Call):
                    # Of torch's `mp.spawn`, by its module's usual names or by its argument `nprocs`.
                    before, _, last = dotted(node.func).rpartition(".")
                    has_ranks = any(one.arg == "nprocs" for one in node.keywords)
                    if last in _STARTERS and (before in _OF_TORCH or has_ranks):
                        function = ast.unparse(node.args[0]) if node.args else "train"
                        notice = (
                            f"{label}, line {node.lineno} starts ranks of its own ({dotted(node.func)}). torchrun has started them already, and "
                            "process groups of other processes hang. Write in its place "
                            f'{function}(int(os.environ["RANK"]), ...), with int(os.environ["WORLD_SIZE"]) for the number of ranks.'
                        )
    loaded = _may_be_loaded(order, frozenset(first))
    return OnRanks(may_be_loaded=loaded, notice=notice, imports=frozenset(imports))


def _walk(tree: ast.AST, *, is_in_function: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield all nodes, and whether each is in a function."""
    waiting = [(tree, is_in_function)]
    while waiting:
        node, is_inside = waiting.pop()
        yield node, is_inside
        is_inside = is_inside or isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        waiting += [(child, is_inside) for child in ast.iter_child_nodes(node)]


def _note(order: _Order, place: _Place, node: ast.AST) -> None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = imports_of_statement(node) or [_UNKNOWN]
        order.imports += [(place, name) for name in names]
    if isinstance(node, ast.Call):
        called = dotted(node.func)
        if called.rpartition(".")[2] in _IMPORTERS:
            order.imports.append((place, _UNKNOWN))
        # A function of Python's own calls none of the program's.
        may_set = called.partition(".")[0] not in sys.stdlib_module_names
        if may_set and not place.is_in_function:
            before = order.calls.get(place.text, place.line)
            order.calls[place.text] = min(before, place.line)
    if _sets_variable(node):
        order.settings.append(place)


def _may_be_loaded(order: _Order, first: frozenset[str]) -> frozenset[str] | None:
    """Return what the program imports before it sets its first variable; nothing where it imports more later."""
    if not order.settings:
        return None
    found = set(first)
    for place, name in order.imports:
        if name != _UNKNOWN and all(
            _is_before(place, setting, order.calls) for setting in order.settings
        ):
            found.add(name)
    for _, name in order.imports:
        is_python = name.partition(".")[0] in sys.stdlib_module_names
        if name not in found and not is_python:
            return frozenset()
    return frozenset(found)


def _is_before(place: _Place, setting: _Place, calls: Mapping[int, int]) -> bool:
    """Whether what the text does at `place` has happened for certain when it sets a variable."""
    if place.is_in_function:
        return False
    if place.text == setting.text and place.line < setting.line:
        return True
    return setting.is_in_function and place.line < calls.get(place.text, sys.maxsize)


def of_codes(
    codes: Iterable[CodeType], texts: Mapping[str, str], labels: Mapping[str, str]
) -> Iterator[Text]:
    """Yield the texts of cells with the lines of those functions that travel."""
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
    """Yield the text of a script, and of what it imports from a folder, in turn."""
    waiting, seen = [start], set[Path]()
    while waiting and len(seen) < MAX_FILES:
        path = waiting.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        data = path.read_bytes()
        yield path.name, data, None
        for name in imports_of_text(data):
            top = folder / name.partition(".")[0]
            waiting += [top.with_name(f"{top.name}.py"), *python_files(top)]


def _sets_variable(node: ast.AST) -> bool:
    # Under another name `os.environ` may be changed unseen.
    if isinstance(node, ast.Assign):
        return dotted(node.value) in ENVIRON
    if isinstance(node, ast.Call) and dotted(node.func) in _MORE_SETTERS:
        return True
    return any(
        kind == "variable" and name not in TORCHRUN_VARIABLES
        for kind, name in acts(node)
    )
