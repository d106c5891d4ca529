"""Reports when and where this process waits for input: in `input`, which debuggers call for each
line.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import os
import sys
from collections.abc import Callable
from types import FrameType

# The number of the prompt, the file and the line of the waiting user code, and the printed prompt.
Waits = Callable[[int, str, int, str], object]
_LIBRARY = f"{os.path.dirname(os.__file__)}/"


def install(waits: Waits, goes_on: Callable[[int], object]) -> None:
    """Make `input` call `waits` before it reads this process's standard input, and `goes_on` after
    it.

    Not in processes forked by this one, and not if the program has replaced `sys.stdin` by an
    object of its own.
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
    """Whether `sys.stdin` is descriptor 0, or another one for the same pipe: torch's breakpoint
    opens it again.
    """
    try:
        return os.path.samestat(os.fstat(sys.stdin.fileno()), os.fstat(0))
    except (AttributeError, OSError, ValueError):
        return False


def place(frame: FrameType | None) -> tuple[str, int]:
    """Return file and line of the innermost frame outside of libraries, starting at this one; ""
    and 0 for none.

    A debugger reads its lines in a method of its own: instead of that frame counts the one at which
    its user looks.
    """
    debugger = frame.f_locals.get("self") if frame else None
    seen = getattr(debugger, "curframe", None)
    caller = seen if isinstance(seen, FrameType) else frame
    while caller is not None:
        name = caller.f_code.co_filename
        if not name.startswith((_LIBRARY, "<frozen ")) and "-packages/" not in name:
            return name, caller.f_lineno
        caller = caller.f_back
    return "", 0
