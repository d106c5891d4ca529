"""What the text of a program shows before its ranks run it: that it sets variables, or starts ranks of its own.

Packages read variables when they are imported. A process that has them loaded already would ignore what the program sets
before it imports them, so the ranks of such a program are new processes. Which package reads which variable nobody
knows: any variable counts that is set anywhere, but for those of torchrun, which no package that is kept loaded reads.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from distmagic.payload.local_modules import (
    MAX_FILES,
    LocalModule,
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
_MORE_SETTERS = ("load_dotenv", "dotenv.load_dotenv", "os.unsetenv", "unsetenv")
_STARTERS = ("spawn", "start_processes")
_OF_TORCH = ("mp", "multiprocessing", "torch.multiprocessing")

# A name for the user, the text, and the lines of it that ranks run: None for all.
Text = tuple[str, str | bytes, Container[int] | None]


@dataclass(frozen=True, kw_only=True)
class OnRanks:
    """`needs_new`: the ranks must be new processes, in which no package is loaded. `notice` is for the user.

    `imports` names what the program imports.
    """

    needs_new: bool = False
    imports: frozenset[str] = frozenset()
    notice: str = ""


def look(texts: Iterable[Text], imported: Iterable[str] = ()) -> OnRanks:
    """Look through the texts of a program, which has `imported` already. One that is no Python shows nothing."""
    needs_new, notice = False, ""
    imports = set(imported)
    for label, text, lines in texts:
        data = text if isinstance(text, bytes) else text.encode()
        if lines is None:
            imports.update(imports_of_text(data))
        if not _WORDS.search(data):
            continue
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if lines is None or getattr(node, "lineno", 0) in lines:
                needs_new = needs_new or _sets_variable(node)
                if not notice and isinstance(node, ast.Call):
                    # Of torch's `mp.spawn`, by its module's usual names or by its argument `nprocs`.
                    before, _, last = dotted(node.func).rpartition(".")
                    has_ranks = any(one.arg == "nprocs" for one in node.keywords)
                    if last in _STARTERS and (before in _OF_TORCH or has_ranks):
                        notice = _of_own_ranks(label, node)
    return OnRanks(needs_new=needs_new, notice=notice, imports=frozenset(imports))


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


def _of_own_ranks(label: str, call: ast.Call) -> str:
    function = ast.unparse(call.args[0]) if call.args else "train"
    return (
        f"{label}, line {call.lineno} starts ranks of its own ({dotted(call.func)}). torchrun has started them already, and "
        "process groups of other processes hang. Write in its place "
        f'{function}(int(os.environ["RANK"]), ...), with int(os.environ["WORLD_SIZE"]) for the number of ranks.'
    )
