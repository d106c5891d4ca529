"""Text that came from a host, sanitized: no control character, no half of a character, no order of writing.

A rank may print anything. On a terminal only colours may pass; in a page only spans.
"""

from __future__ import annotations

import unicodedata
from html import escape

from distmagic.sanitize import ESCAPE, printable

_MAX_WORDS = 400  # characters of one line of words
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_FACES = {1: "dm-bold", 2: "dm-faint", 3: "dm-italic", 4: "dm-underline"}


def plain(text: str) -> str:
    """Return `text` as one line of printable characters, colours gone, tabs expanded."""
    return printable(ESCAPE.sub("", text)).expandtabs(8)


def one_line(text: str) -> str:
    """Return text of a host or an exception as one line of bounded length."""
    words = text[: 4 * _MAX_WORDS].split()
    line = plain(" ".join(words))
    if len(line) <= _MAX_WORDS:
        return line
    return line[: _MAX_WORDS - 1] + "…"


def coloured(text: str) -> str:
    """Return `text` for a terminal: its colours stay and are ended, everything else as in `plain`."""
    parts = []
    for kind, part in _pieces(text):
        parts.append(printable(part) if kind == "text" else f"\x1b[{part}m")
    line = "".join(parts).expandtabs(8)
    return f"{line}\x1b[0m" if "\x1b" in line else line


def spans(text: str) -> str:
    """Return `text` as HTML: escaped, its colours as `<span class="dm-red">`."""
    out = []
    open_class = ""
    style: dict[str, str] = {}
    for kind, part in _pieces(text):
        if kind == "sgr":
            _apply(style, part)
            continue
        wanted = " ".join(sorted(style.values()))
        if wanted != open_class:
            if open_class:
                out.append("</span>")
            if wanted:
                out.append(f'<span class="{wanted}">')
            open_class = wanted
        out.append(escape(printable(part)))
    if open_class:
        out.append("</span>")
    return "".join(out)


def _pieces(text: str) -> list[tuple[str, str]]:
    """Return ("text", ...) and ("sgr", codes) in order; other escape sequences are gone."""
    found = []
    at = 0
    for match in ESCAPE.finditer(text):
        if match.start() > at:
            found.append(("text", text[at : match.start()]))
        if match["sgr"] is not None:
            found.append(("sgr", match["sgr"]))
        at = match.end()
    if at < len(text):
        found.append(("text", text[at:]))
    return found


def _apply(style: dict[str, str], codes: str) -> None:
    """Change `style` (code of a face, or "colour": class) by the numbers of one colour sequence (SGR of ECMA-48)."""
    numbers = iter([int(code) if code else 0 for code in codes[:60].split(";")])
    for code in numbers:
        if code == 0:
            style.clear()
        elif code in (38, 48):
            # `5;N` or `2;R;G;B` follow: colours of a large palette are not kept.
            to_skip = {5: 1, 2: 3}.get(next(numbers, 0), 0)
            for _ in range(to_skip):
                next(numbers, 0)
        elif code in _FACES:
            style[str(code)] = _FACES[code]
        elif code == 22:  # neither bold nor faint
            style.pop("1", None)
            style.pop("2", None)
        elif code in (23, 24):
            style.pop(str(code - 20), None)
        elif 30 <= code <= 37 or 90 <= code <= 97:
            style["colour"] = "dm-" + _COLOURS[code % 10]
        elif code == 39:
            style.pop("colour", None)


def columns_of(text: str) -> int:
    """Return the number of columns that `text` takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(_columns(char) for char in text)


def _columns(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def cut(text: str, columns: int) -> str:
    """Return `text` within `columns`, with an ellipsis where something is missing at its end."""
    if columns_of(text) <= columns:
        return text
    if columns <= 0:
        return ""
    return text[: _fitting(text, columns - 1)] + "…"


def _fitting(text: str, columns: int) -> int:
    """Return how many characters of `text` fit into `columns`."""
    for i, char in enumerate(text):
        columns -= _columns(char)
        if columns < 0:
            return i
    return len(text)


def wrapped(text: str, columns: int, indent: str) -> list[str]:
    """Return `text` in lines of at most `columns`, broken between words where it can be; `indent` begins all but one."""
    lines = []
    line = ""
    columns = max(columns, len(indent) + 2)
    for word in text.split():
        longer = f"{line} {word}" if line.strip() else f"{line}{word}"
        if columns_of(longer) > columns and line.strip():
            lines.append(line)
            longer = f"{indent}{word}"
        while columns_of(longer) > columns:
            fits = _fitting(longer, columns)
            lines.append(longer[:fits])
            longer = indent + longer[fits:]
        line = longer
    return [*lines, line] if line.strip() else lines


def cut_middle(text: str, columns: int) -> str:
    """As `cut`, but the middle is left out: host names often differ in their ends only."""
    if columns_of(text) <= columns:
        return text
    tail = text[-((columns - 1) // 2) :] if columns > 2 else ""
    head = text[: len(text) - len(tail)]
    return cut(head, columns - columns_of(tail)) + tail


def pad(text: str, columns: int, *, right: bool = False) -> str:
    """Return `text` filled up with blanks to `columns`."""
    blanks = " " * (columns - columns_of(text))
    return blanks + text if right else text + blanks
