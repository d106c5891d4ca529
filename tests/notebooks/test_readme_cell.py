"""The first cells of README and manual, executed as a newcomer does: on this machine, without a named host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.notebooks.kernel import live_notebook


@pytest.mark.quick
def test_the_cell_of_the_readme_runs_without_hosts(tmp_path):
    first, cell, _, load, idea = snippets(REPOSITORY / "README.md")
    with live_notebook(tmp_path) as notebook:
        notebook.run(first)
        shown = notebook.run(cell)
        assert shown.startswith("done 100% · 2 ranks on localhost · took ")
        assert shown.count(" 1000/1000 ") == 2
        assert notebook.run("run.metrics[-1]['step'] > 500, len(run.metrics) > 20") == "(True, True)"  # fmt: skip
        assert (
            notebook.run("torch.allclose(run[0], torch.ones(100)), len(run)")
            == "(True, 2)"
        )
        notebook.run(load)
        for _ in range(2):
            assert notebook.run(idea).splitlines()[-1].startswith("ranks 0-1: tensor(")
        assert notebook.run('len(ranks["weights"])') == "2"


def test_the_cell_of_the_manual_runs_without_hosts(tmp_path):
    cell, *_ = snippets(REPOSITORY / "distmagic" / "help" / "cell.md")
    with live_notebook(tmp_path) as notebook:
        shown = notebook.run(cell)
        assert shown.startswith("done 100% · 1 rank on localhost · took ")
        assert (
            notebook.run("run.results[0] < 0.6, run.metrics[-1]['step'] == 500")
            == "(True, True)"
        )


def test_the_recipe_for_a_model_that_does_not_fit_divides_it(tmp_path):
    """On CPUs and gloo: each of two ranks keeps half of the parameters."""
    page = REPOSITORY / "distmagic" / "help" / "howto-train.md"
    (cell,) = (cell for cell in snippets(page) if "fully_shard" in cell)
    with live_notebook(tmp_path) as notebook:
        notebook.run("%load_ext distmagic")
        notebook.run(cell.replace("-o run", "-o run --nproc-per-node 2"))
        shown = notebook.run("run.results[0], run.results[1]")
        assert shown == str((8 * 1024 * 1025 // 2,) * 2)


def snippets(page: Path) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    )
