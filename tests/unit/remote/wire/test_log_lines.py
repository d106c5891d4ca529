"""Messages as lines of a platform's log: written, read, put together again, and what is none of ours."""

from __future__ import annotations

import pytest

from distmagic.remote.wire import log_lines
from distmagic.remote.wire.log_lines import EVENT, MOST_CHARS, RESULT, Joining


def joined(lines: list[str]) -> list[str]:
    joining = Joining()
    parts = [part for line in lines if (part := log_lines.read(line)) is not None]
    return [text for part in parts if (text := joining.add(part)) is not None]


def test_a_short_text_is_one_line():
    lines = log_lines.written(EVENT, 7, '{"t":"hello"}')
    assert lines == ['distmagic event 7 1/1 {"t":"hello"}']
    assert joined(lines) == ['{"t":"hello"}']


def test_a_long_text_is_spread_over_lines_that_no_platform_cuts():
    text = "x" * (2 * MOST_CHARS + 1)
    lines = log_lines.written(RESULT, 0, text)
    assert len(lines) == 3
    assert max(map(len, lines)) < MOST_CHARS + 50
    assert joined(lines) == [text]


def test_a_text_of_which_a_line_is_missing_is_dropped():
    lines = log_lines.written(EVENT, 1, "x" * (3 * MOST_CHARS))
    short = log_lines.written(EVENT, 2, "y")
    assert joined([lines[0], lines[2], *short]) == ["y"]
    assert joined([*lines[1:], *short]) == ["y"]


def test_lines_of_two_texts_are_not_mixed():
    first = log_lines.written(EVENT, 1, "x" * (MOST_CHARS + 1))
    second = log_lines.written(EVENT, 2, "y" * (MOST_CHARS + 1))
    assert joined([first[0], second[1]]) == []


@pytest.mark.parametrize(
    "line",
    [
        "",
        "epoch 3",
        "distmagic",
        "distmagic event 1 1/1",
        "distmagic event -1 1/1 x",
        "distmagic event 1 0/1 x",
        "distmagic event 1 2/1 x",
        "distmagic event 1 1/999 x",
        "distmagic other 1 1/1 x",
        "distmagic event 1 1/1 " + "x" * (MOST_CHARS + 1),
        "xdistmagic event 1 1/1 x",
    ],
)
def test_any_other_line_is_nobodys(line):
    assert log_lines.read(line) is None


def test_a_text_that_is_too_long_for_a_log_is_refused():
    with pytest.raises(ValueError, match="too many for a log"):
        log_lines.written(EVENT, 1, "x" * (log_lines.MOST_PARTS * MOST_CHARS + 1))
