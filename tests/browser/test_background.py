"""A run in the background: its cell is over, its view goes on, and other cells run, are interrupted, ask it and show it."""

from __future__ import annotations

import nbformat
import pytest
from playwright.sync_api import expect

from tests.browser import NotebookPage
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.needs("browser"), pytest.mark.timeout(900)]

LOAD, RUN, OTHER, SECOND, SLEEP, ASK, VIEW, END = range(8)
LOOP, RUNS = 2, 3  # of the notebook with a loop
WORK = """\
%%distributed --hosts localhost:2 --background -o run
import os
import time

import distmagic

def work(end):
    step = 0
    while not os.path.exists(end):
        step += 1
        distmagic.report(step=step, loss=1 / step)
        print("step", step)
        time.sleep(0.1)
    return "the end"

work(END)
"""
ASKED = """\
print(run.stacks())
print(run.logs(1).startswith("step 1"), run.done, run.metrics[0]["loss"])
"""
LOOP_OF_RUNS = """\
import distmagic

def fit(lr):
    import os
    import time
    for step in range(20):
        distmagic.report(step=step, loss=lr / (step + 1))
        time.sleep(0.05)
    while lr == 3 and not os.path.exists(SEEN):
        time.sleep(0.05)

for lr in (1, 2, 3):
    distmagic.run(fit, lr, hosts="localhost:1")
"""


def assert_goes_on(page: NotebookPage, index: int) -> None:
    seen = page.cell(index).locator(".dm-live .dm-part-table")
    before = seen.inner_text()
    wait_until(lambda: seen.inner_text() != before, "the view to move")
    assert page.wait_text(index, r"^running")


def assert_compares(page: NotebookPage, index: int, runs: int, before: int = 0) -> None:
    """Assert that a cell has a table with a row a run, and the curves of the loop's losses over each other.

    `before` are the figures of other trainings.
    """
    cell = page.cell(index)
    rows = cell.locator("table", has_text="min loss").first.locator("tr")
    expect(rows).to_have_count(runs + 1)
    figure = cell.locator("figure.dm-curve", has_text="loss").nth(before)
    assert figure.locator("path:not(.dm-band)").count() >= 3


def notebook_of(*sources: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources]
    )


def test_the_notice_before_idle_ranks_end_stands_under_their_last_cell(
    notebooks, tmp_path
):
    sources = [
        "%load_ext distmagic",
        "%%ranks --hosts localhost:1 --stay-idle 20s\n6 * 7",
        "'another cell'",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources]
    )
    with notebooks.opened(notebook, tmp_path) as page:
        for index in range(3):
            page.run_cell(index)
            page.wait_done(index)
        text = page.wait_text(RUN, "because no cell runs on them")
        assert "%distributed stay ranks keeps them." in text


@pytest.mark.promise("with `--background` the view stays live while other cells run")
def test_the_view_of_a_run_in_the_background(notebooks, tmp_path):
    notebook = notebook_of(
        f"%load_ext distmagic\nEND = {str(tmp_path / 'end')!r}",
        WORK,
        "6 * 7",
        "%%distributed --hosts localhost:1\nlen('four')",
        "import time\nprint('asleep', flush=True)\ntime.sleep(1000)",
        ASKED,
        "%distributed view",
        "run.wait(60).state.phase, run[1]",
    )
    with notebooks.opened(notebook, tmp_path) as page:
        for index in (LOAD, RUN):
            page.run_cell(index)
            page.wait_done(index)
        page.wait_text(RUN, r"^running")
        assert_goes_on(page, RUN)
        page.run_cell(OTHER)
        page.wait_text(OTHER, "42")
        page.run_cell(SECOND)
        page.wait_done(SECOND)
        page.wait_text(SECOND, r"^done")
        page.run_cell(SLEEP)
        page.wait_text(SLEEP, "^asleep")
        page.interrupt()
        page.wait_done(SLEEP)
        page.wait_text(SLEEP, "KeyboardInterrupt")
        assert_goes_on(page, RUN)
        page.run_cell(ASK)
        text = page.wait_text(ASK, "True False 1.0")
        assert "2 ranks at 1 place: both ranks are in work" in text or "rank" in text
        page.save()
        page.reload()
        page.wait_text(RUN, r"^running")
        assert_goes_on(page, RUN)
        page.run_cell(VIEW)
        page.wait_done(VIEW)
        assert_goes_on(page, VIEW)
        assert_goes_on(page, RUN)
        (tmp_path / "end").touch()
        for index in (RUN, VIEW):
            page.wait_text(index, r"^done")
        page.run_cell(END)
        page.wait_text(END, r"\('done', 'the end'\)")
        assert page.page.get_by_text("model not found").count() == 0
        assert page.console_errors == []


def test_runs_of_a_loop_share_an_output_that_compares_them(notebooks, tmp_path):
    """The last one goes on until the two before it were seen above it."""
    seen = tmp_path / "seen"
    (tmp_path / "end").touch()
    notebook = notebook_of(
        f"%load_ext distmagic\nEND, SEEN = {str(tmp_path / 'end')!r}, {str(seen)!r}",
        WORK.replace("while not", "while step < 3 or not"),
        LOOP_OF_RUNS,
        "%distributed runs",
    )
    with notebooks.opened(notebook, tmp_path) as page:
        for index in (LOAD, RUN):
            page.run_cell(index)
            page.wait_done(index)
        page.wait_text(RUN, r"^done")
        page.run_cell(LOOP)
        page.wait_text(LOOP, r"fit\(1\)[^]*fit\(2\)[^]*running")
        # The view of the next run takes the place of the one before.
        expect(page.cell(LOOP).locator(".dm-live")).to_have_count(1)
        seen.touch()
        page.wait_done(LOOP)
        page.wait_text(LOOP, r"^3 runs[^]*done")
        assert_compares(page, LOOP, 3)
        live = page.cell(LOOP).locator(".dm-live")
        expect(live, "no stack of views").to_have_count(1)
        page.run_cell(RUNS)
        page.wait_text(RUNS, r"^4 runs")
        page.save()
        page.reload()
        assert "2 ranks on localhost" in page.wait_text(RUN, r"^done")
        assert_compares(page, LOOP, 3)
        assert_compares(page, RUNS, 4, before=1)
        assert page.page.get_by_text("model not found").count() == 0
        assert page.console_errors == []
