"""Quotes a value of the user for a shell, for YAML or for a Dockerfile.

Pure, and the only such module.

Whatever the value contains, the result is one printable line. It can't end a line of a script, an
sbatch directive or a block of YAML. A word may contain variables made by `variable`: only these are
expanded.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable

# A variable in a word is between two NUL bytes, which no value of a user contains: request/ checks
# that.
_MARK = "\0"


def variable(name: str) -> str:
    """Return the placeholder for the variable `name` in a word."""
    return f"{_MARK}{name}{_MARK}"


def bash(word: str) -> str:
    """Return a word quoted for bash."""
    parts = []
    for place, part in enumerate(pieces(word)):
        if place % 2:
            parts.append(f'"${part}"')
        elif part:
            parts.append(_bash_literal(part))
    return "".join(parts) or "''"


def _bash_literal(text: str) -> str:
    if text.isprintable():
        return shlex.quote(text)
    # Bytes, since what $'\u...' means depends on the locale. Three octal digits: \x takes as many
    # as follow.
    quoted = []
    for byte in os.fsencode(text):
        char = chr(byte)
        is_plain = char.isascii() and char.isprintable() and char not in "\\'"
        quoted.append(char if is_plain else f"\\{byte:03o}")
    return f"$'{''.join(quoted)}'"


def bash_line(words: Iterable[str]) -> str:
    """Return a command as one line of bash."""
    return " ".join(bash(word) for word in words)


def directive(name: str, value: str) -> str:
    """Return a line of an sbatch file.

    Its parser handles quotation marks and backslashes, and expands nothing.
    """
    if not value:
        return f"#SBATCH --{name}"
    if re.fullmatch(r"[A-Za-z0-9_./:,@+=%\[\]-]+", value):
        return f"#SBATCH --{name}={value}"
    return f'#SBATCH --{name}="{_escaped(value)}"'


def _escaped(value: str) -> str:
    return re.sub(r'(["\\])', r"\\\1", value)


def yaml(value: str) -> str:
    """Return a text as YAML: a double-quoted scalar, with unprintable characters escaped."""
    quoted = ""
    for char in _escaped(value).replace("\n", "\\n"):
        quoted += char if char.isprintable() else f"\\U{ord(char):08x}"
    return f'"{quoted}"'


def yaml_block(text: str) -> str:
    """Return lines as a YAML block after a key, indented by two blanks; as one quoted text if a
    block can't represent them.

    The text ends with exactly one line break.
    """
    lines = text.rstrip("\n").split("\n")
    is_plain = all(line.isprintable() for line in lines)
    if not is_plain or lines[0][:1] in ("", " "):
        return f" {yaml(text.rstrip(chr(10)) + chr(10))}\n"
    block = ""
    for line in lines:
        block += f"  {line}\n" if line else "\n"
    return f" |\n{block}"


def pieces(word: str) -> list[str]:
    """Split a word into texts and, between them, names of its variables: every second piece is a
    name.
    """
    return word.split(_MARK)


def dockerfile(words: Iterable[str]) -> str:
    """Return a command in the exec form of a Dockerfile, which no shell reads."""
    return json.dumps(list(words))
