"""Bytes in pieces of any size come out as the same lines and blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.remote.wire.lines import Lines
from distmagic.remote.wire.protocol import MAX_LINE_BYTES, BadLine

PIECES = st.lists(
    st.binary(max_size=12).map(lambda b: b.replace(b"\x01", b"\n")), max_size=12
)


def all_lines(lines: Lines) -> list[bytes]:
    return list(iter(lines.line, None))


@given(PIECES, st.lists(st.integers(1, 9), max_size=30))
def test_any_cutting_gives_the_same_lines(lines, cuts):
    text = b"".join(line.replace(b"\n", b"") + b"\n" for line in lines) + b"rest"
    reader, found = Lines(), []
    for size in [*cuts, len(text)]:
        reader.feed(text[:size])
        text = text[size:]
        found += all_lines(reader)
    assert found == [line.replace(b"\n", b"") for line in lines]
    assert reader.take(100) == b"rest"


@given(st.binary(max_size=300), st.integers(1, 50), st.integers(1, 50))
def test_blocks_between_lines(block, chunk, piece):
    reader, text = Lines(), b"before\n" + block + b"after\n"
    fed = iter([text[i : i + chunk] for i in range(0, len(text), chunk)])
    while (line := reader.line()) is None:
        reader.feed(next(fed))
    found = b""
    while len(found) < len(block):
        part = reader.take(min(piece, len(block) - len(found)))
        found += part
        if not part:
            reader.feed(next(fed))
    while (last := reader.line()) is None:
        reader.feed(next(fed))
    assert (line, found, last) == (b"before", block, b"after")


def test_an_empty_line_is_a_line():
    reader = Lines()
    reader.feed(b"\n\r\n")
    assert all_lines(reader) == [b"", b"\r"]


def test_the_longest_line():
    reader = Lines()
    reader.feed(b"x" * MAX_LINE_BYTES)
    assert reader.line() is None
    reader.feed(b"\n")
    assert len(reader.line() or b"") == MAX_LINE_BYTES


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_without_end_is_refused_before_memory_is_full(end, golden):
    reader = Lines()
    reader.feed(b"x" * (MAX_LINE_BYTES + 1) + end)
    with golden.raises(BadLine):
        reader.line()


def test_a_short_line_in_front_of_a_large_block():
    reader = Lines()
    reader.feed(b"size\n" + b"x" * (3 * MAX_LINE_BYTES))
    assert reader.line() == b"size"
    assert len(reader.take(10 * MAX_LINE_BYTES)) == 3 * MAX_LINE_BYTES
