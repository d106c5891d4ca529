"""Sanitizes text from hosts: removes control characters, surrogates and changes of writing
direction.

A rank may print anything. A terminal only gets colours; a page only gets spans.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator
from html import escape

from distmagic.sanitize import ESCAPE, printable

_MAX_WORDS = 400  # characters of one line
# The eight colours of a terminal, readable on light and dark pages.
_COLOURS = (
    "#777777", "#d9453d", "#2f9e57", "#b8891a", "#3d8bdd", "#b765d6", "#18a0b5", "#8c8c8c",
)  # fmt: skip
_FACES = {1: "font-weight:700", 2: "opacity:.65", 3: "font-style:italic", 4: "text-decoration:underline"}  # fmt: skip
# The codes that a number turns off; 22 is neither bold nor faint.
_ENDS = {22: ("1", "2"), 23: ("3",), 24: ("4",), 39: ("color",), 49: ("background",)}
# Of red, green and blue in the cube of 216 colours.
_LEVELS = (
    0,
    95,
    135,
    175,
    215,
    255,
)


def plain(text: str) -> str:
    """Return `text` as one line of printable characters, without colours, tabs expanded."""
    return printable(ESCAPE.sub("", text)).expandtabs(8)


def one_line(text: str) -> str:
    """Return text of a host or an exception as one line of limited length."""
    words = text[: 4 * _MAX_WORDS].split()
    line = plain(" ".join(words))
    if len(line) <= _MAX_WORDS:
        return line
    return line[: _MAX_WORDS - 1] + "…"


def coloured(text: str) -> str:
    """Return `text` for a terminal.

    Its colours are kept and reset at the end; everything else as in `plain`.
    """
    parts = [
        printable(part) if kind == "text" else f"\x1b[{part}m"
        for kind, part in _pieces(text)
    ]
    line = "".join(parts).expandtabs(8)
    return f"{line}\x1b[0m" if "\x1b" in line else line


def spans(text: str) -> str:
    """Return `text` as HTML: escaped, its colours as `<span style="color:#d9453d">`.

    The styles are in the text itself, so they remain if a page's style sheet is removed.
    """
    out = []
    open_style = ""
    style: dict[str, str] = {}
    for kind, part in _pieces(text):
        if kind == "sgr":
            _apply(style, part)
            continue
        hidden = ("background", "color") if "background" in style else ()
        wanted = ";".join(
            sorted(css for key, css in style.items() if key not in hidden)
        )
        if wanted != open_style:
            if open_style:
                out.append("</span>")
            if wanted:
                out.append(f'<span style="{wanted}">')
            open_style = wanted
        out.append(escape(printable(part)))
    if open_style:
        out.append("</span>")
    return "".join(out)


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Yield ("text", ...) and ("sgr", codes) in order; other escape sequences are removed."""
    # The pattern has one group: every second part is its codes, None for another sequence.
    for index, part in enumerate(ESCAPE.split(text)):
        if index % 2 and part is not None:
            yield "sgr", part
        elif part:
            yield "text", part


def _apply(style: dict[str, str], codes: str) -> None:
    """Change `style`, the CSS values of "color", "background" and other properties, by one colour
    sequence (SGR of ECMA-48).

    The page keeps its own background, so that text is readable in light and dark. A text colour
    chosen for another background is left out while that background is set.
    """
    numbers = iter([int(code) if code else 0 for code in codes[:60].split(";")])
    for code in numbers:
        tens, unit = divmod(code, 10)
        if code == 0:
            style.clear()
        elif code in _FACES:
            style[str(code)] = _FACES[code]
        elif code in _ENDS:
            for key in _ENDS[code]:
                style.pop(key, None)
        elif code in (38, 48):
            colour = _of_large_palette(numbers)
            if colour:
                key = "color" if code == 38 else "background"
                style[key] = f"{key}:{colour}"
        elif tens in (3, 9) and unit < 8:
            style["color"] = f"color:{_COLOURS[unit]}"
        elif tens in (4, 10) and unit < 8:
            style["background"] = f"background:{_COLOURS[unit]}"


def _of_large_palette(numbers: Iterator[int]) -> str:
    """Return the colour for `5;N` (of 256) or `2;R;G;B`, "" for none."""
    kind = next(numbers, 0)
    number = next(numbers, 0) if kind in (2, 5) else 256
    if kind == 2:
        parts = [min(255, one) for one in (number, next(numbers, 0), next(numbers, 0))]
    elif number < 16:
        return _COLOURS[number % 8]
    elif number < 232:
        parts = [_LEVELS[(number - 16) // size % 6] for size in (36, 6, 1)]
    elif number < 256:
        parts = [8 + 10 * (number - 232)] * 3
    else:
        return ""
    return f"#{bytes(parts).hex()}"


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
    """Return `text` within `columns`, with an ellipsis if its end is cut."""
    if columns_of(text) <= columns:
        return text
    if columns <= 0:
        return ""
    room = columns - 1
    fits = 0
    while room >= _columns(text[fits]):
        room -= _columns(text[fits])
        fits += 1
    return f"{text[:fits]}…"


def wrapped(text: str, columns: int, indent: str) -> list[str]:
    """Return `text` in lines of at most `columns`, broken between words; `indent` starts all except
    the first.
    """
    # textwrap counts characters, and a line may have all wide ones.
    wide = sum(_columns(char) > 1 for char in text)
    width = max(columns - wide, columns // 2)
    words = " ".join(text.split())
    return textwrap.wrap(words, width, subsequent_indent=indent, break_on_hyphens=False)


def cut_middle(text: str, columns: int) -> str:
    """Like `cut`, but leaves out the middle: host names often differ only at their ends."""
    if columns_of(text) <= columns:
        return text
    tail = text[-((columns - 1) // 2) :] if columns > 2 else ""
    head = text[: len(text) - len(tail)]
    return cut(head, columns - columns_of(tail)) + tail
