"""The same notebook run by papermill: text on the way, the table in what is saved, an exit code that says how it went."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.lab import Lab
from tests.notebooks.kernel import environment

pytestmark = pytest.mark.needs("lab")

TRAINING = """\
%%distributed --hosts dm1:1,dm2:1 -o run
import distmagic

def train(steps):
    for step in distmagic.track(range(steps)):
        distmagic.report(loss=1 / (step + 1))
    print("sum", sum(range(steps)))
    assert steps > 0, "nothing to do"
    return steps

train(steps)
"""


def papermill(
    lab: Lab, folder: Path, steps: int
) -> tuple[subprocess.CompletedProcess[str], nbformat.NotebookNode]:
    """Run a notebook with this value of its parameter; return how that went, and what was saved."""
    lab.mend()
    parameters = nbformat.v4.new_code_cell(
        "steps = 3", metadata={"tags": ["parameters"]}
    )
    config = f'%load_ext distmagic\n%config Distmagic.ssh_config = "{lab.ssh_config}"'
    rest = [
        nbformat.v4.new_code_cell(text)
        for text in (config, TRAINING, "dict(run.results)")
    ]
    made = nbformat.v4.new_notebook(cells=[parameters, *rest])
    made.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    nbformat.write(made, folder / "training.ipynb")
    command = [
        sys.executable, "-m", "papermill", "--log-output", "--no-progress-bar", "-p", "steps", str(steps), "training.ipynb",
        "saved.ipynb",
    ]  # fmt: skip
    ran = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    return ran, nbformat.read(folder / "saved.ipynb", 4)


def test_a_training_with_a_parameter(session_lab, tmp_path):
    ran, saved = papermill(session_lab, tmp_path, 5)
    assert ran.returncode == 0, ran.stderr
    (shown,) = next(cell for cell in saved.cells if cell.source == TRAINING).outputs
    assert set(shown.data) == {"text/plain", "text/html"}
    assert shown.data["text/plain"].startswith(
        "done 100% · 2 ranks on dm1, dm2 · took "
    )
    assert "[rank 1 dm2] sum 10" in shown.data["text/plain"]
    assert '<table class="dm-table">' in shown.data["text/html"]
    assert saved.cells[-1].outputs[0].data["text/plain"] == "{0: 5, 1: 5}"
    session_lab.assert_clean()
