"""What an executed notebook holds: everything from other cells travelled, every kind of bar was seen, tables stay."""

from __future__ import annotations

import re
from collections.abc import Iterator

import nbformat
import pytest
from nbformat import NotebookNode

from tests.builders.later import Later
from tests.lab import Lab
from tests.notebooks.kernel import LiveNotebook, live_notebook, text_of

nbconvert = Later("nbconvert")

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]

OTHER_CELLS = """\
import dataclasses
import beside
import torch
from tqdm.auto import tqdm
from tqdm.notebook import trange

@dataclasses.dataclass
class Config:
    steps: int = 5

def times(factor):
    return lambda x: factor * x

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor(float(triple(i)))

triple = times(3)
config = Config()
"""
TRAINING = """\
%%distributed -o run
import distmagic

class Sum(torch.nn.Module):
    def forward(self, x):
        return x.sum()

def work(config):
    total = 0
    for i in tqdm(range(config.steps), desc="outer"):
        for _ in trange(3, desc="inner", leave=False):
            total += triple(beside.twice(i))
        distmagic.report(loss=1 / (i + 1))
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    print("rank says", total)
    return total, sum(Sum()(batch).item() for batch in loader), config

work(config)
"""


@pytest.fixture(scope="module")
def executed(
    session_lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveNotebook]:
    """A notebook that ran a training on two hosts; they have torch and numpy, and no tqdm."""
    session_lab.mend()
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "beside.py").write_text("def twice(x):\n    return 2 * x\n")
    with live_notebook(folder) as notebook:
        notebook.run(
            f'%config Distmagic.ssh_config = "{session_lab.ssh_config}"\n%distributed hosts dm1:1,dm2:1'
        )
        notebook.run(OTHER_CELLS)
        notebook.run(TRAINING)
        yield notebook
    session_lab.assert_clean()


def training_cell(notebook: NotebookNode) -> NotebookNode:
    return next(cell for cell in notebook.cells if cell.source == TRAINING)


def test_functions_classes_and_modules_of_other_cells_travel(executed):
    assert (
        executed.run("dict(run.results)")
        == "{0: (180, 84.0, Config(steps=5)), 1: (180, 84.0, Config(steps=5))}"
    )
    # What the cell defines is the notebook's too.
    assert executed.run("Sum()(torch.ones(3)).item()") == "3.0"


def test_bars_and_reports_without_tqdm_on_the_hosts(executed):
    # One output, and nothing a second time.
    (output,) = training_cell(executed.node).outputs
    rows = re.findall(r"^ +\d  dm\d .*", output.data["text/plain"], re.MULTILINE)
    assert [
        re.sub(r"\s+", " ", row).strip().rpartition(" 0.2 ")[0] for row in rows
    ] == [
        "0 dm1 done ██████████ 100% outer 5/5",
        "1 dm2 done ██████████ 100% outer 5/5",
    ]
    assert (
        executed.run("[row['loss'] for row in run.metrics if row['rank'] == 1]")
        == "[1.0, 0.5, 0.3333333333333333, 0.25, 0.2]"
    )


@pytest.mark.promise("the saved notebook keeps the table as text and HTML")
def test_the_table_of_a_saved_notebook(executed, tmp_path):
    nbformat.write(executed.node, tmp_path / "saved.ipynb")
    saved = nbformat.read(tmp_path / "saved.ipynb", 4)
    outputs = training_cell(saved).outputs
    assert len(outputs) == 1, outputs
    (output,) = outputs
    assert set(output.data) == {"text/plain", "text/html"}
    assert output.data["text/plain"].startswith(
        "done 100% · 2 ranks on dm1, dm2 · took "
    )
    assert "[rank 1 dm2] rank says 180" in output.data["text/plain"]
    for part in ('<table class="dm-table">', "<progress", "<svg", "rank says 180"):
        assert part in output.data["text/html"]
    body, _ = nbconvert.HTMLExporter().from_notebook_node(saved)
    for part in ('<table class="dm-table">', "<svg", "loss", "rank says 180"):
        assert part in body
    assert "widget-view" not in body


def test_a_run_is_shown_again_where_it_is_the_value_of_a_later_cell(executed):
    first = training_cell(executed.node).outputs[0].data
    (again,) = executed.cell("run").outputs
    assert again.data == first
    assert executed.run("run.logs(1, 'stdout')") == r"'rank says 180\n'"
    refused = executed.fail("run.logs(9)")
    assert "UsageError: There is no rank 9" in refused
    assert "Its ranks: 0, 1." in refused


def test_saved_text_of_every_cell_is_free_of_our_own_frames(executed):
    text = "\n".join(text_of(cell) for cell in executed.node.cells)
    assert "distmagic/" not in text.replace("~/.distmagic/", "")
