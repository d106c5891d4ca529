"""What is said before there is a run: soon, with its seconds, and what came of it where there is none."""

from __future__ import annotations

import itertools
import math
import re
import threading
import time
from types import SimpleNamespace

import pytest

from distmagic import render
from distmagic.screens import announcing, notebook
from tests.lab.waiting import HANG_S, wait_until
from tests.scenes import running


class Heard:
    """A screen that keeps what is announced."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.has_heard = threading.Event()
        self.heard_s = 0.0

    def announce(self, text: str) -> None:
        self.heard_s = time.monotonic()
        self.texts.append(text)
        self.has_heard.set()

    def show(self, state) -> None: ...

    def finish(self, state) -> None: ...

    def can_type(self) -> bool:
        return False

    def requests(self) -> tuple[str, ...]:
        return ()


def test_what_takes_no_time_is_not_worth_a_word(monkeypatch):
    monkeypatch.setattr(announcing, "FIRST_S", 5.0)
    screen = Heard()
    with announcing.announcing(screen, lambda: "own lines", "failed"):
        pass
    assert screen.texts == []


def test_the_first_cell_of_a_kernel_shows_at_once_what_happens(monkeypatch):
    monkeypatch.setattr(announcing, "FIRST_S", math.inf)
    screen = Heard()
    with announcing.announcing(screen, lambda: "own lines", "failed", at_once=True):
        assert screen.has_heard.wait(HANG_S)
    assert screen.texts == ["own lines"]


def test_the_first_word_comes_within_a_tenth_of_a_second():
    for _ in range(200):  # a busy machine may be late now and then
        screen = Heard()
        began_s = time.monotonic()
        with announcing.announcing(screen, lambda: "own lines", "failed"):
            assert screen.has_heard.wait(HANG_S)
        if screen.heard_s - began_s < 0.1:
            return
    raise AssertionError("not one of 200")


def test_the_seconds_are_counted(monkeypatch):
    monkeypatch.setattr(announcing, "_EVERY_S", 0.01)
    clock = itertools.count(step=0.7)
    monkeypatch.setattr(announcing, "time", type("", (), {"monotonic": clock.__next__}))
    screen = Heard()
    with announcing.announcing(screen, lambda: "own lines", "failed"):
        while len(screen.texts) < 3:
            screen.has_heard.wait(HANG_S)
            screen.has_heard.clear()
    assert screen.texts[:3] == ["own lines", "own lines, 1 s", "own lines, 2 s"]


def test_lines_that_fail_leave_no_word_that_they_still_run():
    screen = Heard()

    def fail() -> None:
        with announcing.announcing(screen, lambda: "own lines", "failed"):
            screen.has_heard.wait(HANG_S)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert screen.texts[-1] == "failed"


def test_a_notebook_shows_the_words_in_the_place_of_the_run(monkeypatch):
    published = []

    def display(data, *, update: bool, display_id: str, **_: object) -> None:
        published.append((data["text/html"], display_id, update))

    monkeypatch.setattr("IPython.display.display", display)
    screen = notebook.NotebookScreen(in_background=True)
    screen.announce("the cell's <own> lines")
    screen.show(running())
    (words, first_id, is_update), (run, second_id, is_second_update) = published[:2]
    assert "the cell&#x27;s &lt;own&gt; lines" in words
    hidden_by_view = re.match(r'<div class="dm-before-[0-9a-f]+">', words)[0]
    assert run == f"{hidden_by_view}{render.html(running())}</div>"
    assert first_id == second_id
    assert (is_update, is_second_update) == (False, True)


def test_what_goes_on_may_change_and_its_seconds_begin_anew(monkeypatch):
    """The cell's own lines are over, and a question waits for its answer."""
    monkeypatch.setattr(announcing, "_EVERY_S", 0.01)
    clock = itertools.count(step=3)
    ticks = SimpleNamespace(monotonic=lambda: float(next(clock)))
    monkeypatch.setattr(announcing, "time", ticks)
    texts = iter(["own lines"] * 2)
    screen = Heard()
    with announcing.announcing(screen, lambda: next(texts, "waits"), "failed"):
        wait_until(lambda: len(screen.texts) >= 4, "four words")
    assert screen.texts[:4] == ["own lines, 3 s", "own lines, 6 s", "waits, 3 s", "waits, 6 s"]  # fmt: skip
