"""The arguments that differ between runs: `fit(lr=0.1)` and `fit(lr=0.2)`, `train.py --lr 0.1` and
`train.py --lr 0.2`. Pure.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Sequence

from distmagic.comparison.summary import RunSummary
from distmagic.remote.system.gc_pause import parsed_expression
from distmagic.render.text_width import cut_middle, one_line

_MOST = 6  # number of columns
_WIDTH = 20  # characters of a value


def arguments(runs: Sequence[RunSummary]) -> dict[str, list[str]]:
    """Return the arguments that differ between runs, in the order of the calls: one text for each
    run, "" if it has none.
    """
    found = [arguments_of(run.call) for run in runs]
    names = dict.fromkeys(name for given in found for name in given)
    columns: dict[str, list[str]] = {}
    for name in names:
        values = [one_line(given.get(name, "")) for given in found]
        if len(set(values)) > 1 and len(columns) < _MOST:
            columns[cut_middle(one_line(name), _WIDTH)] = [cut_middle(value, _WIDTH) for value in values]  # fmt: skip
    return columns


def trainings(runs: Sequence[RunSummary]) -> tuple[tuple[int, ...], ...]:
    """Return groups of run indices: runs in one group call the same function or the same script."""
    found: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        call = _call_of(run.call)
        name = _command(run.call)[0] if call is None else ast.unparse(call.func)
        found.setdefault(name, []).append(number)
    return tuple(map(tuple, found.values()))


def arguments_of(call: str) -> dict[str, str]:
    """Return the arguments of a Python call or a command line by name; positional ones by their
    position.
    """
    tree = _call_of(call)
    if tree is None:
        _, words = _command(call)
        return _words(words)
    found = {}
    for place, value in enumerate(tree.args, start=1):
        found[f"argument {place}"] = ast.unparse(value)
    for one in tree.keywords:
        if one.arg is not None:
            found[one.arg] = ast.unparse(one.value)
    return found


def _call_of(text: str) -> ast.Call | None:
    try:
        tree = parsed_expression(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if isinstance(tree, ast.Call) else None


def _command(text: str) -> tuple[str, list[str]]:
    """Return a script or module and the words after it; or the whole text and no words if it is
    neither.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        return text, []
    is_module = words[:1] == ["-m"] and len(words) > 1
    if not is_module and not (words and words[0].endswith(".py")):
        return text, []
    return words[is_module], words[1 + is_module :]


def _words(words: Sequence[str]) -> dict[str, str]:
    """Return flags with their values, and the other words by their position."""
    found: dict[str, str] = {}
    flag = ""
    place = 0
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            found[name] = value if equals else "yes"
            flag = "" if equals else name
        elif flag:
            found[flag] = word
            flag = ""
        else:
            place += 1
            found[f"argument {place}"] = word
    return found
