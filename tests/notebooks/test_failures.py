"""Cells that fail: they fail for nbconvert too, show the user's lines, and say what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import nbformat
import pytest

from tests.lab import Lab
from tests.notebooks.kernel import LiveNotebook, environment, live_notebook

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]

EARLIER = """\
def halve(x):
    if x % 2:
        raise ValueError(f"{x} is odd")
    return x // 2"""
FAILING = """\
%%distributed --hosts dm1:1,dm2:1
import os

def work(x):
    return halve(x + int(os.environ["RANK"]))

work(4)"""


@pytest.mark.promise("its traceback fails the cell")
def test_traceback_under_nbconvert(session_lab, tmp_path):
    """For nbconvert, too: it ends with the lines of the cells, in which the first rank failed."""
    session_lab.mend()
    config = f'%load_ext distmagic\n%config Distmagic.ssh_config = "{session_lab.ssh_config}"'
    cells = [
        nbformat.v4.new_code_cell(source)
        for source in (config, EARLIER, FAILING, "print('never')")
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "training.ipynb")
    command = [
        sys.executable,
        "-m",
        "nbconvert",
        "--to",
        "notebook",
        "--execute",
        "training.ipynb",
    ]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "nbclient.exceptions.CellExecutionError" in ran.stderr
    lines = ran.stderr.splitlines()
    start = lines.index(
        "WorkerFailed: rank 1 (dm2, local_rank 0) raised ValueError: 5 is odd"
    )
    assert lines[start + 1 : start + 3] == [
        "  Cell In[2], line 3, in halve",
        '--> raise ValueError(f"{x} is odd")',
    ]
    assert lines[start + 3].startswith(
        "Its whole output: _run.logs(1), on dm2 under ~/.distmagic/jobs/"
    )
    assert (
        ran.stderr.count("Traceback (most recent call last):\n  Cell In[3], line 7")
        == 0
    )
    session_lab.assert_clean()


# ---- cells that start nothing


@pytest.fixture(scope="module")
def notebook(
    session_lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveNotebook]:
    """A notebook with hosts, on which nothing is ever started."""
    session_lab.mend()
    with live_notebook(tmp_path_factory.mktemp("notebook")) as made:
        made.run(
            f'%config Distmagic.ssh_config = "{session_lab.ssh_config}"\n%distributed hosts dm1:1,dm2:1'
        )
        made.run("import threading\nlock = threading.Lock()\ndata = bytes(3_000_000)")
        yield made
    assert [
        path
        for host in session_lab.hosts
        for path in host.files("/home/node/.distmagic/jobs")
    ] == []
    session_lab.assert_clean()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("def f():\n    with lock:\n        pass\nf()", "PayloadError: f uses `lock`"),
        ("def f(x):\n    return len(x)\nf(data)", "PayloadTooLarge: "),
        ("class Model:\n    pass", "UsageError: line 2: "),
        ("def train(:\n    pass", "SyntaxError: "),
    ],
)
def test_a_wrong_cell_fails(notebook, cell, error):
    shown = notebook.fail(f"%%distributed --payload-limit 1M\n{cell}")
    assert f"\n{error}" in f"\n{shown}"
