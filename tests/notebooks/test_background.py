"""Runs that a cell does not wait for, in a kernel that nbclient drives."""

from __future__ import annotations

import pytest

from tests.e2e import faults
from tests.lab.waiting import wait_until
from tests.notebooks.kernel import live_notebook, text_of

pytestmark = pytest.mark.needs("lab")

CELL = """\
%%distributed --background -o {name}
import time
from pathlib import Path

def wait():
    print("here")
    while not Path("~/go").expanduser().exists():
        time.sleep(0.05)
    {end}

wait()
"""


def cell(name: str, end: str) -> str:
    return CELL.format(name=name, end=end)


def test_a_run_in_the_background_of_a_notebook_and_the_end_of_its_kernel(lab, tmp_path):
    with live_notebook(tmp_path) as notebook:
        notebook.run(f"%config Distmagic.ssh_config = {str(lab.ssh_config)!r}")
        notebook.run("%distributed hosts dm1:1 dm2:1")
        first = notebook.cell(cell("first", "return 7"))
        notebook.run(cell("second", "1 / 0"))
        assert notebook.run("6 * 7") == "42"
        asked = "while not first.metrics and 'here' not in first.logs(0): pass"
        notebook.run(f"while len(first.state.workers) < 2: pass\n{asked}")
        assert "would lose the connections" in notebook.fail("%distributed down")
        for host in lab.hosts[:2]:
            (host.home / "go").touch()
        assert notebook.run("first.wait(120)\ndict(first.results)") == "{0: 7, 1: 7}"
        said = notebook.fail("second.wait(120)")
        assert "ZeroDivisionError: division by zero" in said
        assert "--> 1 / 0" in said
        notebook.run("pass")  # what came meanwhile is taken in with the next cell
        assert text_of(first).startswith("done"), "its own output, not another cell's"
        for host in lab.hosts[:2]:
            (host.home / "go").unlink()
        notebook.run(cell("third", "return"))
        wait_until(
            lambda: all(faults.pids(host, "rank", "*") for host in lab.hosts[:2]),
            "the ranks of the third",
        )
    # The kernel is gone: so are its ranks, long before a lease of a minute has run out.
    wait_until(
        lambda: not any(faults.pids(host, "rank", "*") for host in lab.hosts[:2]),
        "the end of the ranks",
    )
    lab.assert_clean()
