"""Counts in words: one thing is not several, in whatever place a user reads it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch

from distmagic.payload.sizes import plural, size_text
from distmagic.remote.training import inventory
from distmagic.render import output, quantities
from distmagic.screens.log import LogScreen
from distmagic.state.model import OutputLine
from distmagic.state.series import Series
from tests.scenes import running


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 ranks"), (1, "1 rank"), (1024, "1024 ranks"), (12_345, "12,345 ranks")],
)
def test_a_count(number, words):
    assert plural(number, "rank") == words


def long_line() -> str:
    text = "x" * (output._MAX_CHARS + 1)
    return output.log_line(OutputLine(rank=0, label="a", stream="stdout", text=text))


def burst() -> str:
    stream = io.StringIO()
    state = running()
    more = 1 + len(state.lines)
    LogScreen(stream).show(replace(state, lines_seen=more))
    return stream.getvalue()


def model() -> str:
    values = {"model": torch.nn.Linear(1, 1, bias=False)}
    return str(inventory.of(values, ["model"]))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (lambda: f"{size_text(1)}.", "1 byte."),
        (lambda: f"{quantities.size(0, 1)}.", "0 of 1 byte."),
        (
            lambda: repr(Series().extended((0, 0, 2), limit=9)),
            "<Series of 1 point, the",
        ),
        (long_line, "(1 more character)"),
        (burst, "... 1 line not shown; "),
        (model, "Linear, 1 parameter on cpu"),
    ],
)
def test_one_of_a_thing_is_not_several(text, part):
    assert part in text()
