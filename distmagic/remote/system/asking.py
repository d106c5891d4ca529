"""Says when this process waits for somebody to type, and where: in `input`, which debuggers call for each of their lines."""

from __future__ import annotations

import builtins
import inspect
import itertools
import os
import sys
from collections.abc import Callable
from types import FrameType

# The number of the prompt, the file and the line of the user's code that waits, and what was printed to ask for a line.
Waits = Callable[[int, str, int, str], object]
_LIBRARY = f"{os.path.dirname(os.__file__)}/"


def install(waits: Waits, goes_on: Callable[[int], object]) -> None:
    """Have `input` call `waits` before it reads this process's standard input, and `goes_on` after it.

    Not so in processes that this one forks, nor where the program has put something of its own in place of `sys.stdin`.
    """
    plain = builtins.input
    numbers = itertools.count(1)
    pid = os.getpid()

    def input(prompt: object = "", /) -> str:  # noqa: A001 - it takes the place of that function
        if os.getpid() != pid or not _reads_stdin():
            return plain(prompt)
        number = next(numbers)
        own = inspect.currentframe()
        file, line = place(own and own.f_back)
        waits(number, file, line, str(prompt))
        try:
            return plain(prompt)
        finally:
            goes_on(number)

    builtins.input = input


def _reads_stdin() -> bool:
    """Whether `sys.stdin` is descriptor 0, or another one of the same pipe: torch's breakpoint opens it anew."""
    try:
        return os.path.samestat(os.fstat(sys.stdin.fileno()), os.fstat(0))
    except (AttributeError, OSError, ValueError):
        return False


def place(frame: FrameType | None) -> tuple[str, int]:
    """Return the file and the line of the innermost frame from this one on that is of no library; "" and 0 for none."""
    caller = frame
    while caller is not None:
        name = caller.f_code.co_filename
        if not name.startswith((_LIBRARY, "<frozen ")) and "-packages/" not in name:
            return name, caller.f_lineno
        caller = caller.f_back
    return "", 0
