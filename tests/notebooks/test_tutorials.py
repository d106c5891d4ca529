"""The notebooks that teach, executed from the first cell to the last; their exercises know right answers from wrong."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests import REPOSITORY
from tests.notebooks.kernel import environment, text_of

pytestmark = [pytest.mark.timeout(400)]

RANKS = REPOSITORY / "notebooks" / "01_ranks_and_rendezvous.ipynb"
RIGHT = """
where_is_rank_5 = (1, 1)
without_a_gpu = {4, 5, 6, 7}
my_share = lambda items, rank, world_size: items[rank::world_size]
seconds_of_an_all_reduce = 0.32
"""
WRONG = """
where_is_rank_5 = (2, 0)
without_a_gpu = {5}
my_share = lambda items, rank, world_size: items
seconds_of_an_all_reduce = 0.04
"""


def executed(path: Path, folder: Path) -> list[NotebookNode]:
    """Return the cells of code after all of them ran; a cell that fails without being meant to raises."""
    notebook = nbformat.read(path, 4)
    client = NotebookClient(
        notebook, timeout=180, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment())
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def cell_with(cells: list[NotebookNode], words: str) -> NotebookNode:
    (found,) = [cell for cell in cells if words in cell.source]
    return found


def answered(path: Path, answers: str) -> list[str]:
    """Return what the last cell prints of each exercise with these answers."""
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    printed: list[str] = []
    exec(f"{answers}\n{cells[-1].source}", {"print": printed.append})
    return [line.rpartition(": ")[2] for line in printed]


def test_ranks_and_rendezvous(tmp_path: Path) -> None:
    cells = executed(RANKS, tmp_path)

    table = text_of(cell_with(cells, "for name in ranks[0]"))
    assert re.search(r"^RANK +0 +1 +2$", table, re.MULTILINE)
    assert re.search(r"^LOCAL_RANK +0 +1 +0$", table, re.MULTILINE)

    static = text_of(cell_with(cells, "%%distributed --dry-run\n"))
    assert "--node-rank=0" in static
    assert "--node-rank=1" in static
    c10d = text_of(cell_with(cells, "--dry-run --rdzv-backend c10d"))
    assert c10d.count("--rdzv-backend=c10d") == 2
    assert "--node-rank" not in c10d

    seats = re.findall(
        r"attempt (\d): RANK (\d) is .* process (\d+)",
        text_of(cell_with(cells, 'startswith("attempt")')),
    )
    assert sorted(seat[:2] for seat in seats) == [
        (attempt, rank) for attempt in "01" for rank in "012"
    ]
    assert len({process for _, _, process in seats}) == 6

    broken = cell_with(cells, "GLOO_SOCKET_IFNAME=nosuch0")
    assert "Unable to find address for: nosuch0" in text_of(broken)
    assert "talks over lo" in text_of(cell_with(cells, "%%distributed -o run\nmeet()"))

    plots = [
        cell
        for cell in cells
        if any("image/png" in output.get("data", {}) for output in cell.outputs)
    ]
    assert len(plots) == 3
    assert text_of(cells[-1]).count("not answered yet") == 4


def test_exercises_of_ranks_and_rendezvous() -> None:
    assert answered(RANKS, RIGHT) == ["right"] * 4
    assert answered(RANKS, WRONG) == ["not right yet"] * 4
