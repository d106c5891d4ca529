"""Makes text and pictures from other machines harmless: no text moves the cursor, hides text or
reverses its direction. Pure.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct

_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
# the maximum side of a picture: a small file can decode to a very large picture
_MOST_PIXELS = 4096

ESCAPE = re.compile(
    r"\x1b\[(?P<sgr>[0-9;]*)m"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # cursor movement, clearing and the like
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\|$)"  # window titles, links
    r"|\x1b[ -/]*[0-~]?"
)
_KEPT = re.compile(r"[\n\r]|\x1b\[[0-9;]*m|(?P<other>" + ESCAPE.pattern + ")")
_CONTROL = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ufdd0-\ufdef\ufffe\uffff]"
)
# Invisible characters of Unicode's category Cf: some reverse the direction of the following text,
# some hide text. The joiners U+200C and U+200D are kept: Persian, languages of India and emoji need
# them.
_HIDDEN = re.compile(
    r"[\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)
_HALF = re.compile(r"[\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` without control characters, surrogates and line breaks.

    The visible part of a colour sequence remains.
    """
    return _HALF.sub("\ufffd", _HIDDEN.sub("", _CONTROL.sub("", text)))


def line(text: str) -> str:
    """Return `text` as one line, without terminal control sequences; a tab becomes a space."""
    return printable(ESCAPE.sub("", text)).replace("\t", " ")


def log(text: str) -> str:
    """Return `text` with its line breaks, carriage returns, tabs and colours, without other control
    sequences.
    """
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
    """Return a colour sequence (SGR of ECMA-48) without code 8, which conceals text; "" if nothing
    remains.
    """
    codes = sequence[2:-1].split(";")
    numbers = [code.lstrip("0") for code in codes]
    kept = []
    at = 0
    while at < len(codes):
        size = 1
        if numbers[at] in ("38", "48", "58"):
            # A colour has numbers as arguments: 38;5;8 is one of 256, 38;2;8;8;8 is true colour.
            form = numbers[at + 1] if at + 1 < len(numbers) else ""
            size = {"5": 3, "2": 5}.get(form, 1)
            if 1 < size <= len(codes) - at:  # otherwise it is incomplete or no colour
                kept += codes[at : at + size]
        elif numbers[at] != "8":
            kept.append(codes[at])
        at += size
    return f"\x1b[{';'.join(kept)}m" if kept else ""


def closed(text: str) -> str:
    """Return output of `log`, with a reset at its end if colours may still be on."""
    last = text.rpartition("\x1b[")[2].partition("m")[0]
    is_reset = "\x1b" not in text or not last.strip("0;")
    return text if is_reset else f"{text}\x1b[0m"


def lines(text: str) -> str:
    """Return `text` with its line breaks and tabs, without terminal control sequences."""
    if "\r" not in text and _without_breaks(text).isprintable():
        return text
    return "\n".join(printable(ESCAPE.sub("", one)) for one in text.split("\n"))


def _without_breaks(text: str) -> str:
    return text.replace("\n", "").replace("\r", "").replace("\t", "")


def png(text: str) -> str:
    """Decode and encode a base64 PNG again; return "" for anything else, and for a very large
    picture.
    """
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
