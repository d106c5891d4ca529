"""The output of the ranks in the live view: filtered, selected and read while lines pour in, and earlier lines on demand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from playwright.sync_api import Locator, expect

from distmagic.screens import board
from distmagic.state.model import OutputLine, RunState
from tests import scenes

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


def test_a_selection_and_a_filter_stay_while_lines_pour_in(page):
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
    page.page.get_by_label("show only lines with this text").fill("")
    looks_at(pane, "pane.scrollHeight")
    page.show(at(230))
    kept = log.locator("pre").first.locator(".dm-line")
    expect(kept).to_have_count(
        1000
    )  # the last thousand stay, once what was left out has come
    assert "line 1847 of odd" in kept.last.inner_text()


NEXT_FRAME = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def looks_at(pane: Locator, top: str) -> None:
    """Scroll the output as a user does; return when the page has heard of it."""
    pane.evaluate(f"pane => {{ pane.scrollTop = {top}; }}")
    pane.page.evaluate(NEXT_FRAME)


def test_earlier_lines_come_when_they_are_asked_for(page):
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
    gaps = body.locator(".dm-gap:visible")
    expect(gaps).to_have_count(1)  # the one between lines is filled by itself
    assert gaps.locator("span").all_inner_texts() == ["… 408 lines"]
    assert numbers(body) == list(range(408, 2648))
    text = page.page.get_by_label("show only lines with this text")
    text.fill("line 41")
    expect(gap).to_be_hidden()  # all that the kernel has is searched
    expect(log.locator(".dm-log-bar > span")).to_have_text("11 of 2,648 lines")
    page.show(at(340))
    first = body.locator(".dm-line:visible").first
    assert first.inner_text().strip().endswith("line 41 of odd")
    text.fill("")
    assert numbers(body) == list(range(2728))
    looks_at(log.locator(".dm-log-lines"), "pane.scrollHeight")
    page.show(at(350))
    assert numbers(body) == list(range(1808, 2808)), "the last thousand again"


def test_what_the_page_and_the_kernel_have_not_is_said_to_a_search(page):
    """As where lines came too fast: of 10,000 in a moment the kernel has the last 400."""
    page.open("light")
    page.show(at(0))
    page.show(at(1250))
    log = page.page.locator(".dm-log")
    about = log.locator(".dm-log-bar > span")
    page.page.get_by_label("show only lines with this text").fill("line 97")
    expect(about).to_have_text("100 of the 408 lines that are here; 9,600 more are not")
    page.page.get_by_label("show only lines with this text").fill("line 3 ")
    expect(about).to_have_text("1 of the 408 lines that are here; 9,600 more are not")
    assert "9,600 lines came too fast" in log.locator("pre").first.inner_text()


def test_a_traceback_that_comes_at_once_is_there_from_its_top(page):
    """Also where the run is over right after it, and the kernel answers nothing any more."""
    page.open("light")
    page.page.evaluate("() => { window.kept = python; window.python = () => Promise.reject(new Error('busy')); }")  # fmt: skip
    state = at(0)
    page.show(state)
    texts = [f"  File {i}" for i in range(300)]
    raised = ["Traceback (most recent call last):", *texts, "ValueError: no"]
    traceback = tuple(
        OutputLine(rank=1, label="rank 1 gpu-a", stream="stderr", text=text.ljust(300))
        for text in raised
    )
    more = (*state.lines, *traceback)
    failed = replace(state, lines=more, lines_seen=len(more), at_s=101.0)
    page.show(failed)
    body = page.page.locator(".dm-log pre").first
    expect(body.locator(".dm-gap:visible")).to_have_count(
        1
    )  # more than is sent at once
    page.finish(replace(failed, at_s=101.1))
    assert body.locator(".dm-line").count() == len(more)
    assert body.locator(".dm-gap:visible").count() == 0
    page.page.evaluate("() => { window.python = window.kept; }")
    page.page.get_by_role("button", name="First error").click()
    found = page.page.locator(".dm-found").inner_text()
    assert "Traceback (most recent call last):" in found


def test_one_line_of_four_ranks_is_one_also_beside_a_gap_that_was_filled(page):
    page.open("light")
    page.show(at(0))
    words = ["warning"] * 4
    fillers = [f"{'x' * 900} {i}" for i in range(30)]
    said = [*words[:2], *fillers, *words[2:], *fillers[:10]]
    ranks = [0, 1, *[0] * 30, 2, 3, *[1] * 10]
    lines = tuple(
        OutputLine(rank=rank, label=f"rank {rank} a", stream="stdout", text=text)
        for rank, text in zip(ranks, said, strict=True)
    )
    more = (*at(0).lines, *lines)
    page.show(replace(at(0), lines=more, lines_seen=len(more), at_s=101.0))
    body = page.page.locator(".dm-log pre").first
    expect(body.locator(".dm-gap:visible")).to_have_count(0)
    warning = body.locator(".dm-line", has_text="warning")
    expect(warning).to_have_count(1)
    assert warning.inner_text().strip() == "[4 ranks] warning"
    about = page.page.locator(".dm-log-bar > span")
    assert about.inner_text() == f"{len(more)} of {len(more)} lines"


def test_the_end_is_followed_until_the_user_scrolls_also_in_a_tab_that_was_hidden(page):
    page.open("light")
    for tenth in range(20):
        page.show(at(tenth))
    pane = page.page.locator(".dm-log-lines")
    main = page.page.locator("main")
    is_at_end = "pane => pane.scrollTop + pane.clientHeight > pane.scrollHeight - 8"

    def looks_away_and_back(tenth: int) -> None:
        main.evaluate("main => { main.style.display = 'none'; }")
        page.page.evaluate(NEXT_FRAME)
        page.show(at(tenth))
        page.page.evaluate(NEXT_FRAME)
        main.evaluate("main => { main.style.display = ''; }")
        page.page.evaluate(NEXT_FRAME)

    assert pane.evaluate(is_at_end)
    looks_away_and_back(30)
    assert pane.evaluate(is_at_end)
    page.show(at(31))
    assert pane.evaluate(is_at_end)
    page.page.set_viewport_size({"width": 500, "height": 900})  # lines take more room
    page.page.evaluate(NEXT_FRAME)
    page.show(at(32))
    assert pane.evaluate(is_at_end)
    looks_at(pane, "200")
    looks_away_and_back(40)
    page.show(at(41))
    assert not pane.evaluate(is_at_end), "the user has scrolled"
    looks_at(pane, "pane.scrollHeight")
    page.show(at(42))
    assert pane.evaluate(is_at_end)


def numbers(body: Locator) -> list[int]:
    """Return the numbers of the lines, as their text has them."""
    texts = body.locator(".dm-line").all_text_contents()
    return [int(re.findall(r"line (\d+)", text)[0]) for text in texts]
