"""Text and pictures that came from somewhere else, made harmless: nothing in a text moves, hides or turns anything. Pure."""

from __future__ import annotations

import base64
import binascii
import re
import struct

_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_MOST_PIXELS = 4096  # of a picture's side: a small file can be a very large picture

ESCAPE = re.compile(
    r"\x1b\[(?P<sgr>[0-9;]*)m"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # moves, clears and the like
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\|$)"  # titles, links
    r"|\x1b[ -/]*[0-~]?"
)
_KEPT = re.compile(r"[\n\r]|\x1b\[[0-9;]*m|(?P<other>" + ESCAPE.pattern + ")")
_CONTROL = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ufdd0-\ufdef\ufffe\uffff]"
)
# Characters of Unicode's category Cf that nobody sees: some turn the direction of what follows, some hide a text in another.
# The joiners U+200C and U+200D stay: Persian, languages of India and emoji are written with them.
_HIDDEN = re.compile(
    r"[\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)
_HALF = re.compile(r"[\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` without control characters, half characters and line breaks; what is left of a colour stays."""
    return _HALF.sub("\ufffd", _HIDDEN.sub("", _CONTROL.sub("", text)))


def line(text: str) -> str:
    """Return `text` as one line, without anything that a terminal would obey; a tab becomes a blank."""
    return printable(ESCAPE.sub("", text)).replace("\t", " ")


def log(text: str) -> str:
    """Return `text` with its line breaks, carriage returns, tabs and colours, and nothing else that is obeyed."""
    if _without_breaks(text).isprintable():
        return text
    found, at = [], 0
    for match in _KEPT.finditer(text):
        kept = "" if match["other"] else match[0]
        if "8" in kept:
            kept = _revealing(kept)
        found += [printable(text[at : match.start()]), kept]
        at = match.end()
    return "".join((*found, printable(text[at:])))


def _revealing(sequence: str) -> str:
    """Return a colour sequence (SGR of ECMA-48) without 8, which conceals what follows; "" if nothing is left of it."""
    codes = sequence[2:-1].split(";")
    numbers = [code.lstrip("0") for code in codes]
    kept: list[str] = []
    at = 0
    while at < len(codes):
        size = 1
        if numbers[at] in ("38", "48", "58"):
            # A colour has numbers of its own: 38;5;8 is one of 256, 38;2;8;8;8 a true one.
            form = numbers[at + 1] if at + 1 < len(numbers) else ""
            size = {"5": 3, "2": 5}.get(form, 1)
            if 1 < size <= len(codes) - at:  # else it is none, or not whole
                kept += codes[at : at + size]
        elif numbers[at] != "8":
            kept.append(codes[at])
        at += size
    return f"\x1b[{';'.join(kept)}m" if kept else ""


def closed(text: str) -> str:
    """Return what `log` has returned with a reset behind it, if colours may be left on at its end."""
    last = text.rpartition("\x1b[")[2].partition("m")[0]
    is_reset = "\x1b" not in text or not last.strip("0;")
    return text if is_reset else f"{text}\x1b[0m"


def lines(text: str) -> str:
    """Return `text` with its line breaks and tabs, and without anything else that a terminal would obey."""
    if "\r" not in text and _without_breaks(text).isprintable():
        return text
    return "\n".join(printable(ESCAPE.sub("", one)) for one in text.split("\n"))


def _without_breaks(text: str) -> str:
    return text.replace("\n", "").replace("\r", "").replace("\t", "")


def png(text: str) -> str:
    """Return `text`, the base64 of a PNG, written anew; "" for anything else, and for a picture that is very large."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return ""
    if len(data) < 24 or not data.startswith(_PNG):
        return ""
    wide, high = struct.unpack(">II", data[16:24])
    if not (0 < wide <= _MOST_PIXELS and 0 < high <= _MOST_PIXELS):
        return ""
    return base64.b64encode(data).decode()
