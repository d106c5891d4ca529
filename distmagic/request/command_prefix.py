"""The words before the Python of a host: a shell that sets up its environment, and a program such as a container's. Pure."""

from __future__ import annotations

import shlex

from distmagic.errors import SpecError

SETUP_FAILED = (
    97  # the exit code of the shell, which no Python and no shell has by itself
)


def words_before_python(setup: str, exec_prefix: str) -> tuple[str, ...]:
    """Return what stands before the Python on its command line.

    `setup` is bash. What it writes goes to stderr, so that nothing is mistaken for the program's own output.
    Raises `SpecError` for a prefix that can't be split into words.
    """
    try:
        prefix = tuple(shlex.split(exec_prefix))
    except ValueError as error:
        raise SpecError(
            f"--exec-prefix can't be split into words: {str(error).lower()}.",
            f"It is: {exec_prefix}",
        ) from None
    if not setup.strip():
        return prefix
    # One line, because a log-in shell such as csh is given no other: $'...' has its line breaks as \\n.
    script = setup.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    code = f"{{ eval $'{script}'; }} </dev/null >&2 || exit {SETUP_FAILED}; "
    return ("bash", "-c", code + 'exec "$@"', "bash", *prefix)
