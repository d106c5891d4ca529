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
# These turn the direction of what follows.
_HIDDEN = re.compile(r"[\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
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
        found += [
            printable(text[at : match.start()]),
            "" if match["other"] else match[0],
        ]
        at = match.end()
    return "".join((*found, printable(text[at:])))


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
