"""The quickstart as a person runs it in JupyterLab: bars that grow, a table that stays, and a button that stops."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.browser import NotebookPage
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.needs("browser"), pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).resolve().parents[2]
QUICKSTART = REPOSITORY / "notebooks" / "00_quickstart.ipynb"
LOAD, PLAYGROUND, HOSTS, _, _, DATA, TRAIN, LOOK = range(8)  # its cells of code
LONG = """\
%%distributed --hosts localhost:2
import time

import distmagic

def work():
    for step in distmagic.track(range(10_000)):
        print("step", step)
        time.sleep(0.2)

work()
"""
NEXT = "%%distributed --hosts localhost:1\nprint('runs' + ' again')"


def bars(page: NotebookPage, index: int) -> list[float]:
    """Return how far each rank is, as its bar in the live table shows it: the width of what is filled."""
    table = page.cell(index).locator(".dm-live table.dm-table progress")
    return table.evaluate_all(
        "all => all.map(bar => bar.position * bar.getBoundingClientRect().width)"
    )


def is_live(page: NotebookPage, index: int) -> bool:
    return page.cell(index).locator(".dm-live").count() == 1


def test_the_quickstart_in_jupyterlab(notebooks, tmp_path):
    """Open it, run it, stop a long cell, save, and look at what was saved."""
    notebook = nbformat.read(QUICKSTART, 4)
    notebook.cells.append(nbformat.v4.new_code_cell(LONG))
    notebook.cells.append(nbformat.v4.new_code_cell(NEXT))
    last = sum(cell.cell_type == "code" for cell in notebook.cells) - 1
    with notebooks.opened(notebook, tmp_path) as page:
        page.run_cell(LOAD)
        page.run_cell(PLAYGROUND)
        page.wait_text(PLAYGROUND, r"^node1, node2 ")
        page.run_cell(HOSTS)
        page.run_cell(DATA)
        page.wait_done(DATA)
        watch_training(page)
        page.run_cell(LOOK)
        assert "test accuracy 0.9" in page.wait_text(LOOK, r"test accuracy")
        stop_a_long_cell(page, last - 1)
        page.run_cell(last)
        page.wait_text(last, r"runs again")
        page.wait_done(last)
        page.screenshot(tmp_path / "stopped.png")
        page.save()
        page.reload()
        read_without_a_kernel(page)
        page.screenshot(tmp_path / "reloaded.png")
        assert page.console_errors == []


@pytest.mark.parametrize("notebooks", ["notebook"], indirect=True)
def test_a_run_in_notebook_7(notebooks, tmp_path):
    """The same view as in JupyterLab: a live bar a rank, then the table that stays; the button stops it."""
    cells = [
        nbformat.v4.new_code_cell(text) for text in ("%load_ext distmagic", LONG, NEXT)
    ]
    with notebooks.opened(nbformat.v4.new_notebook(cells=cells), tmp_path) as page:
        page.run_cell(0)
        page.run_cell(1)
        wait_until(lambda: (seen := bars(page, 1))[1:] and min(seen) > 0, "two bars")
        assert is_live(page, 1)
        page.screenshot(tmp_path / "running.png")
        page.interrupt()
        page.wait_done(1)
        assert "Cancelled: The run was interrupted" in page.wait_text(1, r"^stopped")
        page.run_cell(2)
        page.wait_text(2, r"runs again")
        page.wait_done(2)
        page.screenshot(tmp_path / "stopped.png")
        assert page.console_errors == []


def watch_training(page: NotebookPage) -> None:
    """Run the training; see each of four bars grow while it goes on, and the table and curves that stay."""
    page.watch_bars(TRAIN)
    page.run_cell(TRAIN)
    page.wait_grown(TRAIN, 4, 300)
    page.wait_done(TRAIN, 300)
    assert is_live(page, TRAIN)
    text = page.wait_text(TRAIN, r"^done")
    assert "4 ranks on node1, node2" in text
    assert "[rank 0 node1] epoch 10 of 10" in text
    assert text.count("rank\thost") == 1
    assert page.cell(TRAIN).locator("svg").count() >= 1
    assert len(set(bars(page, TRAIN))) == 1


def stop_a_long_cell(page: NotebookPage, index: int) -> None:
    """Interrupt a cell with the button; it ends within seconds and says so."""
    page.run_cell(index)
    page.wait_text(index, r"step 5")
    page.interrupt()
    page.wait_done(index)
    text = page.wait_text(index, r"^stopped")
    assert "Cancelled: The run was interrupted" in text


def read_without_a_kernel(page: NotebookPage) -> None:
    """See what the saved file shows."""
    text = page.wait_text(TRAIN, r"^done")
    assert "4 ranks on node1, node2" in text
    assert page.cell(TRAIN).locator("table.dm-table progress").count() == 4
    assert page.cell(TRAIN).locator("svg").count() >= 1
    assert page.page.locator(".jupyter-widgets").count() == 0
    assert "Model not found" not in page.page.content()
