"""A picture of a host is one that a page can draw, or none; of a text nothing hides, and colours end where it ends."""

from __future__ import annotations

import base64
import io
import sys

import pytest
from PIL import Image

from distmagic import sanitize
from tests.builders.harmless import is_hidden


def png(wide: int = 3, high: int = 2) -> bytes:
    into = io.BytesIO()
    Image.new("RGB", (wide, high)).save(into, "PNG")
    return into.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_png_stays_as_it_is():
    assert sanitize.png(encoded(png())) == encoded(png())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no base64!",
        encoded(b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"),
        encoded(b"\xff\xd8\xff\xe0 a jpeg"),
        encoded(png()[:20]),
        encoded(png()).replace("A", '"', 1),
        encoded(png()) + '"><script>',
        encoded(png()[:16] + b"\x00\x01\x00\x00" * 2 + png()[24:]),
        encoded(png()[:16] + b"\0" * 8 + png()[24:]),
        "ÿ" * 40,
    ],
)
def test_anything_else_is_none(text):
    assert sanitize.png(text) == ""


@pytest.mark.parametrize(
    "shown", [sanitize.printable, sanitize.line, sanitize.lines, sanitize.log]
)
def test_no_character_is_left_that_nobody_sees(shown):
    """All of Unicode: what is gone of format characters is what turns or hides, and nothing else."""
    hidden = [chr(i) for i in range(sys.maxunicode + 1) if is_hidden(chr(i))]
    assert {"\u061c", "\u202e", "\u200b", "\U000e0041"} < set(hidden)
    assert shown("".join(f"a{char}" for char in hidden)) == "a" * len(hidden)
    signs = (
        "a\u200cb \U0001f469\u200d\U0001f4bb \u0600 \u06dd \u070f \U000110bd \U00013430"
    )
    assert shown(signs) == signs


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("\x1b[8mhidden", "hidden"),
        ("\x1b[008mhidden", "hidden"),
        ("\x1b[1;8mbold", "\x1b[1mbold"),
        ("\x1b[8;31;8mred", "\x1b[31mred"),
        ("\x1b[;8mreset", "\x1b[mreset"),
        ("\x1b[38;5;8mgrey", "\x1b[38;5;8mgrey"),
        ("\x1b[4;58;5;8munderlined", "\x1b[4;58;5;8munderlined"),
        ("\x1b[48;5;8;8mgrey", "\x1b[48;5;8mgrey"),
        ("\x1b[38;2;8;8;8;8mgrey", "\x1b[38;2;8;8;8mgrey"),
        ("\x1b[38;8mno colour", "no colour"),
        ("\x1b[38;2;8;8mno colour", "no colour"),
        ("\x1b[28;48mseen", "\x1b[28mseen"),
    ],
)
def test_nothing_is_concealed_and_colours_stay(text, kept):
    assert sanitize.log(text) == kept


@pytest.mark.parametrize(
    ("text", "is_on"),
    [
        ("plain", False),
        ("\x1b[31mred", True),
        ("\x1b[31mred\x1b[0m", False),
        ("\x1b[31mred\x1b[m, m", False),
        ("\x1b[31mred\x1b[0;0m", False),
        ("\x1b[0;31mred", True),
        ("\x1b[38;5;0mblack", True),
        ("\x1b[0m\x1b[44m", True),
    ],
)
def test_colours_end_with_the_text(text, is_on):
    assert sanitize.closed(text) == text + ("\x1b[0m" if is_on else "")
