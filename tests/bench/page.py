"""Section page: how soon a cell shows anything in a new kernel, and how soon a page that is loaded anew is live."""

from __future__ import annotations

import time

import nbformat
from playwright.sync_api import Page

from tests.bench.bench import REPOSITORY, Bench
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import scratch
from tests.browser import NotebookPage, chromium, notebooks_in_browser
from tests.browser.live_runs import RUN, WORK, live, notebook_of
from tests.system.components import reason_without

TITLE = "A page of JupyterLab in Chromium"
_FIRST = "first sign of a cell in a new kernel, 2 s after `%load_ext`"
_READING_MS = 2000
_LIVE = "reload of a page to its live view"
_LIMITS_S = {_FIRST: 0.1, _LIVE: 1.5}
_WIDGET_AGAIN = "reload of a page to an `ipywidgets.HTML` of its kernel"
_WIDGET = "first `ipywidgets.HTML` in a new kernel"
_WIDGETS_CELLS = (
    "import ipywidgets",
    "ipywidgets.HTML('<b>shown</b>')",
)
# The page itself notes it: its clock begins with the reload.
_WATCH = """selector => new Promise(resolve => {
  const look = () => document.querySelector(selector) ? resolve(performance.now()) : requestAnimationFrame(look);
  look();
})"""
_RUN_AND_WATCH = """index => new Promise(resolve => {
  const began = performance.now();
  const { node } = notebook.code(index).outputArea;
  const look = () => node.innerText.trim() ? resolve(performance.now() - began) : requestAnimationFrame(look);
  notebook.run(index);
  look();
})"""


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Run a cell on two ranks of this machine, in a new kernel a round, and load its page anew."""
    found: dict[str, list[float]] = {
        _FIRST: [],
        _WIDGET: [],
        _LIVE: [],
        _WIDGET_AGAIN: [],
    }
    reason = reason_without("browser")
    if not reason:
        env = {"PYTHONPATH": str(REPOSITORY)}
        with (
            scratch("page") as folder,
            chromium() as browser,
            notebooks_in_browser(browser, env) as notebooks,
        ):
            for number in range(bench.rounds_dear + 1):
                end = folder / f"end{number}"
                with notebooks.opened(notebook_of(WORK, end, folder)) as page:
                    first_s, live_s = _round(page)
                    end.touch()
                    page.wait_text(RUN, r"^done")
                with notebooks.opened(_widget_alone()) as page:
                    widget_s = _first_sign(page, 1)
                    page.save()
                    again_s = _reloaded(page.page, ".widget-html b")
                bench.say(f"page: first sign {first_s:.2f} s, of a widget {widget_s:.2f} s, live {live_s:.2f} s, of a widget {again_s:.2f} s")  # fmt: skip
                if number:  # the first round only warms the caches
                    found[_FIRST].append(first_s)
                    found[_WIDGET].append(widget_s)
                    found[_LIVE].append(live_s)
                    found[_WIDGET_AGAIN].append(again_s)
    return tuple(
        MetricRow(
            what=what, unit="s", ours=tuple(found[what]), target=Target(limit=limit_s, of="ours"), note=reason or "",
            against=against, theirs=tuple(found[against]),
        )
        for (what, limit_s), against in zip(_LIMITS_S.items(), (_WIDGET, _WIDGET_AGAIN), strict=True)
    )  # fmt: skip


def _widget_alone() -> nbformat.NotebookNode:
    cells = [nbformat.v4.new_code_cell(text) for text in _WIDGETS_CELLS]
    return nbformat.v4.new_notebook(cells=cells)


def _round(page: NotebookPage) -> tuple[float, float]:
    """Return when the cell showed something, and when the page that was loaded anew had the live view."""
    first_s = _first_sign(page, RUN)
    page.wait_text(RUN, r"^running")
    page.save()
    page.page.on("dialog", lambda dialog: dialog.accept())
    live_s = _reloaded(page.page, ".dm-live td.dm-n")
    assert live(page).count() == 1
    return first_s, live_s


def _first_sign(page: NotebookPage, cell: int) -> float:
    """Run the first cell, read for two seconds, and return when the other one showed something."""
    page.run_cell(0)
    page.wait_done(0)
    page.page.wait_for_timeout(_READING_MS)
    took_ms: float = page.page.evaluate(_RUN_AND_WATCH, cell)
    return took_ms / 1e3


def _reloaded(page: Page, selector: str) -> float:
    began_s = time.monotonic()
    page.reload(wait_until="commit")
    late_s = time.monotonic() - began_s - page.evaluate("performance.now()") / 1e3
    shown_ms: float = page.evaluate(_WATCH, selector)
    return late_s + shown_ms / 1e3
