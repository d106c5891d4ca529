"""The arguments in which runs differ: `fit(lr=0.1)` and `fit(lr=0.2)`, `train.py --lr 0.1` and `train.py --lr 0.2`. Pure."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from distmagic.comparison.summary import RunSummary
from distmagic.render.text_width import cut_middle, one_line

_MOST = 6  # columns
_WIDTH = 20  # of a value


@dataclass(frozen=True, kw_only=True)
class ArgumentColumn:
    """One argument, with its value in each run, "" for none."""

    title: str
    values: tuple[str, ...]


def argument_columns(runs: Sequence[RunSummary]) -> list[ArgumentColumn]:
    """Return the arguments of the runs that have not the same value in all of them, in the order of the calls."""
    found = [_arguments(run.call) for run in runs]
    names = dict.fromkeys(name for given in found for name in given)
    columns = []
    for name in names:
        values = [one_line(given.get(name, "")) for given in found]
        if len(set(values)) > 1:
            cut = tuple(cut_middle(value, _WIDTH) for value in values)
            title = cut_middle(one_line(name), _WIDTH)
            columns.append(ArgumentColumn(title=title, values=cut))
    return columns[:_MOST]


def _arguments(call: str) -> dict[str, str]:
    """Return the arguments of a call of Python, or of a command, by name; those without one by their place."""
    try:
        tree = ast.parse(call, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _words(call)
    if not isinstance(tree, ast.Call):
        return _words(call)
    found = {}
    for place, value in enumerate(tree.args, start=1):
        found[f"argument {place}"] = ast.unparse(value)
    for one in tree.keywords:
        if one.arg is not None:
            found[one.arg] = ast.unparse(one.value)
    return found


def _words(command: str) -> dict[str, str]:
    """Return the flags of a script with their values, and its other words; {} for what is no script's command."""
    try:
        words = shlex.split(command)
    except ValueError:
        return {}
    is_module = words[:1] == ["-m"]
    if not is_module and not (words and words[0].endswith(".py")):
        return {}
    del words[: 1 + is_module]
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
