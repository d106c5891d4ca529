"""The output of the ranks in the live view: filtered, selected and read while lines pour in, and earlier lines on demand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from playwright.sync_api import Locator, expect

from distmagic.screens import board
from distmagic.state.model import OutputLine, RunState
from tests import scenes
from tests.browser.plain_page import PlainPage

pytestmark = [pytest.mark.needs("browser"), pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are sent as often as the run's own clock says, however long this machine takes to draw them."""
    monkeypatch.setattr(board, "_LONGEST_PAUSE_S", 0.0)


def lines(first: int, count: int) -> tuple[OutputLine, ...]:
    return tuple(
        OutputLine(rank=i % 2, label=f"rank {i % 2} gpu-a", stream="stdout", text=f"line {i} of {'even' if i % 2 == 0 else 'odd'}")
        for i in range(first, first + count)
    )  # fmt: skip


def at(tenth: int, state: RunState | None = None) -> RunState:
    """Return the state of a run in which every tenth of a second has eight new lines."""
    state = scenes.running() if state is None else state
    seen = 8 * (tenth + 1)
    first = max(0, seen - 400)
    kept = lines(first, seen - first)
    return replace(state, lines=kept, lines_seen=seen, at_s=100 + tenth / 10)


def test_a_selection_and_a_filter_stay_while_lines_pour_in(page: PlainPage):
    page.page.set_viewport_size({"width": 1400, "height": 900})
    page.open("light")
    for tenth in range(30):
        page.show(at(tenth))
    log = page.page.locator(".dm-log")
    assert log.locator(".dm-line").count() > 200
    page.page.get_by_label("show only lines with this text").fill("of odd")
    chosen = log.locator(".dm-line:visible").nth(90)
    chosen.scroll_into_view_if_needed()
    chosen.select_text()
    before = page.page.evaluate("document.getSelection().toString()")
    pane = log.locator(".dm-log-lines")
    top = pane.evaluate("pane => pane.scrollTop")
    for tenth in range(30, 200):
        page.show(at(tenth))
    assert page.page.evaluate("document.getSelection().toString()") == before
    assert re.search(r"line \d+ of odd", before)
    assert pane.evaluate("pane => pane.scrollTop") == top
    texts = log.locator(".dm-line:visible").all_inner_texts()
    assert len(texts) > 700
    assert all("of odd" in text for text in texts)
    page.page.evaluate("document.getSelection().removeAllRanges()")
    pane.evaluate("pane => { pane.scrollTop = pane.scrollHeight; }")
    page.show(at(230))
    kept = log.locator("pre").first.locator(".dm-line")
    assert kept.count() == 1000, "the last thousand stay"
    assert "line 1847 of odd" in kept.last.inner_text()


def test_earlier_lines_come_when_they_are_asked_for(page: PlainPage):
    page.page.set_viewport_size({"width": 1400, "height": 900})
    page.open("light")
    for tenth in range(0, 301, 12):
        page.show(at(tenth))
    log = page.page.locator(".dm-log")
    body = log.locator("pre").first
    assert numbers(body) == list(range(1408, 2408))
    gap = body.locator(".dm-gap").first
    assert gap.locator("span").inner_text() == "… 1,408 lines"
    button = gap.get_by_role("button", name="Show more")
    button.scroll_into_view_if_needed()
    looked_at = body.locator(".dm-line", has_text="line 1408 of even")
    top = looked_at.bounding_box()["y"]
    button.click()
    expect(gap.locator("span")).to_have_text("… 408 lines")
    assert numbers(body) == list(range(408, 2408))
    assert abs(looked_at.bounding_box()["y"] - top) < 2, "what was seen stays there"
    page.show(at(330))
    assert numbers(body) == [*range(408, 2408), *range(2548, 2648)]
    gaps = body.locator(".dm-gap:visible")
    assert gaps.locator("span").all_inner_texts() == ["… 408 lines", "… 140 lines"]
    gaps.nth(1).get_by_role("button").click()
    expect(gaps).to_have_count(1)
    assert numbers(body) == list(range(408, 2648))
    page.page.get_by_label("show only lines with this text").fill("line 41")
    page.show(at(340))
    first = body.locator(".dm-line:visible").first
    assert first.inner_text().strip().endswith("line 410 of even")
    gap.get_by_role("button").click()
    expect(gap).to_be_hidden()
    page.page.get_by_label("show only lines with this text").fill("")
    assert numbers(body) == list(range(2728))
    log.locator(".dm-log-lines").evaluate(
        "pane => { pane.scrollTop = pane.scrollHeight; }"
    )
    page.show(at(350))
    assert numbers(body) == list(range(1808, 2808)), "the last thousand again"
    # Loaded anew, by a view that began late: what it has not it says where to find.
    page.open("light")
    page.show(at(331))
    expect(gap.locator("span")).to_have_text("… 2,556 lines")
    for _ in range(2):
        gap.get_by_role("button").click()
        page.page.wait_for_function(
            "!document.querySelector('.dm-gap button:disabled')"
        )
    expect(gap.locator("span")).to_have_text(
        "… 2,256 lines: run.logs(rank), %distributed logs 0612-101500-5f3a RANK"
    )


def numbers(body: Locator) -> list[int]:
    """Return the numbers of the lines, as their text has them."""
    texts = body.locator(".dm-line").all_text_contents()
    return [int(re.findall(r"line (\d+)", text)[0]) for text in texts]
