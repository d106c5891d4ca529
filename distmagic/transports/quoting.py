"""Quotes an argv as one line for any log-in shell: sh, bash, dash, zsh, fish, csh and tcsh. Pure.

sshd passes the line to the user's shell with `-c`. Inside single quotes these shells only differ in
the quote itself, the backslash (fish) and the exclamation mark (csh). These three are written
outside of quotes, each after a backslash.
"""

from __future__ import annotations

import re

from distmagic.transports import Argv

_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./:,@+-]*\Z|-[A-Za-z0-9-]*\Z")
_OUTSIDE = re.compile(r"([\\'!])")


def command_line(argv: Argv) -> str:
    """Return `argv` as a line that replaces the shell by the program; a leading `~/` of the program
    means the host's home.

    Raises `ValueError` for an empty argv, and for a line break or a NUL, which csh can't handle. A
    word of more than about 3000 characters is too long for csh.
    """
    if not argv or not argv[0]:
        raise ValueError("a command needs a program")
    words = [quote(word) for word in argv]
    if argv[0].startswith("~/"):
        words[0] = "~/" + quote(argv[0][2:])  # quoted, ~ would not be the home
    return "exec " + " ".join(words)


def quote(word: str) -> str:
    """Return `word` quoted for all these shells."""
    if re.search(r"[\n\r\0]", word):
        raise ValueError(
            f"a line break or a NUL in {word[:80]!r}: it can't be on a command line"
        )
    if _PLAIN.match(word):
        return word
    parts = []
    for part in _OUTSIDE.split(word):
        if _OUTSIDE.match(part):
            parts.append(f"\\{part}")
        elif part:
            parts.append(f"'{part}'")
    return "".join(parts) or "''"
