"""A picture of a host is one that a page can draw, or none."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from distmagic import sanitize


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
