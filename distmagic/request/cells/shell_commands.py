"""Rewrites shell commands in a cell, such as `!ls` and `files = !ls`, as Python that ranks can run.
Pure.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from distmagic.remote.system.gc_pause import parsed

_COMMAND = re.compile(r"^\s*(?:[\w\s,]+=\s*)?!", re.MULTILINE)
# IPython's calls for `!ls` and `files = !ls`, and the Python that stands for them.
_RUNS = re.compile(r"^(\s*)get_ipython\(\)\.system\((.*)\)$", re.MULTILINE)
_READS = re.compile(r"get_ipython\(\)\.getoutput\((.*)\)$", re.MULTILINE)


def with_commands(text: str, transform: Callable[[str], str]) -> str:
    """Return a cell in which lines such as `!ls` are Python, so that ranks can run them;
    `transform` is IPython's.

    As in IPython, `{name}` in a command stands for a value. `$name` is left to the shell.
    """
    try:
        parsed(text)
    except (SyntaxError, ValueError):
        if not _COMMAND.search(text):
            return text
        text = _RUNS.sub(_run_command, transform(text))
        return _READS.sub(_read_command, text)
    return text


def command_in(code: ast.AST) -> str:
    """Return the command for which `with_commands` has written this expression, such as `!ls`; ""
    for any other.
    """
    if isinstance(code, ast.Call) and isinstance(code.func, ast.Attribute):
        if code.func.attr == "splitlines":
            return command_in(code.func.value)
        if ast.unparse(code.func.value) == "__import__('subprocess')" and code.args:
            words = code.args[0].args[-1] if isinstance(code.args[0], ast.Call) else code.args[0]  # fmt: skip
            if isinstance(words, ast.Constant) and isinstance(words.value, str):
                return f"!{words.value}"
    return ""


def _run_command(found: re.Match[str]) -> str:
    command = _with_values(found[2])
    return (
        f'{found[1]}_exit_code = __import__("subprocess").call({command}, shell=True)'
    )


def _read_command(found: re.Match[str]) -> str:
    command = _with_values(found[1])
    return f'__import__("subprocess").getoutput({command}).splitlines()'


def _with_values(literal: str) -> str:
    """Return code for a command with its `{values}`; braces that are not Python's, as those of awk,
    are kept.
    """
    filled = "f" + re.sub(r"\$\{([^{}]*)\}", r"${{\1}}", literal)
    try:
        parsed(filled)
    except SyntaxError:
        return literal
    # A rank has distmagic's remote part alone.
    call = '__import__("distmagic.remote.values.call", fromlist=["call"])'
    return f"{call}.expanded(lambda: {filled}, {literal})"
