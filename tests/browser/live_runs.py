"""Runs that the tests of the live view look at: their cells, and a notebook in which one goes on and is seen live."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from playwright.sync_api import Locator

from tests.browser.harness import NotebookPage, Notebooks
from tests.lab.waiting import wait_until

LOAD, RUN, NEXT = range(3)
# Each rank writes a line ten times a second, one of them to stderr, until a file appears.
WORK = """\
%%distributed --hosts localhost:2 -o run
import os
import sys
import time

import distmagic

def work(end, lr):
    rank = int(os.environ["RANK"])
    step = 0
    while not os.path.exists(end):
        step += 1
        distmagic.report(step=step, total=100_000, loss=1 / step)
        print(f"step {step} of rank {rank}")
        if step == 5 and rank == 1:
            print("ValueError: only a line", file=sys.stderr)
        if step % 10 == 0:
            print(f"all are at {step}")
        time.sleep(0.1)

while not os.path.exists(GO):
    time.sleep(0.05)
work(END, lr=0.1)
"""


# More lines than a page has at first, no faster than a notebook keeps them.
WORDY = WORK.replace(
    "        if step % 10",
    """\
        for more in range(40 if rank == 0 and step <= 30 else 0):
            print(f"more {step}.{more}")
        if step > 30:
            time.sleep(0.4)
        if step % 10""",
)

IN_A_WIDGET = (
    WORK.split("\n", 1)[1].split("while not os.path.exists(GO)", 1)[0]
    + """\
import ipywidgets
from IPython.display import display

print("printed before the run")
shown = ipywidgets.Output()
display(shown)
with shown:
    run = distmagic.run(work, END, 0.1, hosts="localhost:2")
print("printed after it")
"""
)

# Rank 1 waits in a debugger, and rank 0 for rank 1.
DEBUGGED = """\
%%distributed --hosts localhost:2 -o run
import os

import torch
import torch.distributed as dist

def work():
    dist.init_process_group("gloo")
    total = torch.tensor([1.0 + dist.get_rank()])
    if dist.get_rank() == 1:
        breakpoint()
    dist.all_reduce(total)
    return total.item(), input("a word? ") if dist.get_rank() == 0 else ""

work()
"""

CHARTS = """\
%%distributed --hosts localhost:2
import base64
import os
import time

import distmagic

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAMAAAACCAIAAAASFvFNAAAAEElEQVR4nGP8zwAFTDAGAwATKQED8NgHhAAAAABJRU5ErkJggg=="

def work(end):
    rank = int(os.environ["RANK"])
    if rank == 0:
        distmagic.show(base64.b64decode(PNG))
    for step in range(400):
        value = 100.0 if step == 133 and rank == 0 else 1.0 + rank
        many = {f"eval/m{i}": step + i for i in range(6)}
        distmagic.report(step=step, total=400, loss=value, decay=10.0 ** (-step / 50), **many)
        time.sleep(0.01)
    while not os.path.exists(end):
        distmagic.report(step=399)
        time.sleep(0.1)

work(END)
"""


@contextmanager
def opened(
    notebooks: Notebooks, tmp_path: Path, source: str = WORK, begins: str = r"^running"
) -> Iterator[NotebookPage]:
    """Yield a notebook whose run goes on, and is seen live. Before it, the cell's own lines are seen to run."""
    notebook = notebook_of(source, tmp_path / "end", tmp_path / "go")
    with notebooks.opened(notebook, shots=tmp_path) as page:
        page.run_cell(LOAD)
        page.wait_done(LOAD)
        page.run_cell(RUN)
        if "GO" in source:
            page.wait_text(
                RUN, r"^running the cell's own lines in the notebook, \d+ s$"
            )
            (tmp_path / "go").touch()
        wait_until(lambda: live(page).count() == 1, "the live view")
        page.wait_text(RUN, begins)
        yield page
        (tmp_path / "end").touch()


def notebook_of(source: str, end: Path, go: Path) -> nbformat.NotebookNode:
    """Return a notebook with a run: its rank code ends when the file `end` appears, the cell's own lines at `go`."""
    sources = [
        f"%load_ext distmagic\nEND, GO = {str(end)!r}, {str(go)!r}",
        source,
        "run.state.phase",
    ]
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources]
    )


def live(page: NotebookPage) -> Locator:
    return page.cell(RUN).locator(".dm-live")


def button(page: NotebookPage, name: str) -> Locator:
    return live(page).get_by_role("button", name=name, exact=True)


def lines(page: NotebookPage) -> list[str]:
    """Return the lines of output that are to be seen."""
    shown = live(page).locator(".dm-log-lines .dm-line:visible")
    return [text.strip() for text in shown.all_inner_texts()]
