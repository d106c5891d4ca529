"""The button that interrupts, pressed before any rank runs: Cancelled, the user's own lines, and nothing left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import Lab
from tests.lab.waiting import wait_until
from tests.notebooks.kernel import LiveNotebook, live_notebook

pytestmark = pytest.mark.needs("lab")


def interrupted(notebook: LiveNotebook, lab: Lab, cell: str, begun: Path) -> str:
    """Execute a cell that writes a file, interrupt it then, and return what it shows; nothing may have been started."""

    def press() -> None:
        wait_until(begun.exists, "the cell to begin")
        notebook.interrupt()

    with notebook.meanwhile(press):
        shown = notebook.fail(cell)
    assert [
        path for host in lab.hosts for path in host.files("/home/node/.distmagic/jobs")
    ] == []
    lab.assert_clean()
    assert notebook.run("6 * 7") == "42"
    return shown


@pytest.mark.quick
def test_while_the_cells_own_statements_run(lab, tmp_path):
    with live_notebook(tmp_path) as notebook:
        notebook.run(f'%config Distmagic.ssh_config = "{lab.ssh_config}"')
        line = "pathlib.Path('begun').touch(); time.sleep(1000)"  # one line, wherever in it the interrupt arrives
        cell = f"%%distributed --hosts dm1\nimport pathlib, time\n{line}\nprint()"
        shown = interrupted(notebook, lab, cell, tmp_path / "begun")
    assert f"----> 3 {line}\n" in shown
    assert "\nCancelled: Interrupted before " in shown
    assert "distmagic/" not in shown


def test_while_the_call_is_packed(lab, tmp_path):
    with live_notebook(tmp_path) as notebook:
        notebook.run(f'%config Distmagic.ssh_config = "{lab.ssh_config}"')
        notebook.run(
            "import pathlib, time\nclass Slow:\n    def __reduce__(self):\n"
            "        pathlib.Path('begun').touch()\n        time.sleep(1000)\nslow = Slow()"
        )
        shown = interrupted(
            notebook, lab, "%%distributed --hosts dm1\nprint(slow)", tmp_path / "begun"
        )
    # Said where the interrupt took longer to come than a word takes to be worth while.
    announced = "nothing was started: the cell's own lines did not come to their end\n"
    said = shown.removeprefix(announced)
    assert said.startswith("Cancelled: Interrupted before ")
    assert "\n" not in said
