"""The harness itself: widgets are drawn, a cell can be interrupted, and the next one runs."""

from __future__ import annotations

import nbformat
import pytest

from tests.browser import Notebooks

pytestmark = [pytest.mark.needs("browser"), pytest.mark.timeout(600)]

BAR = "import ipywidgets; bar = ipywidgets.IntProgress(value=7, description='rank 0'); display(bar)"
WORK = """\
import threading
print("started", flush=True)
try:
    threading.Event().wait(120)
except KeyboardInterrupt:
    print("interrupted")
bar.value = 50
"""


def test_widgets_interrupt_and_the_next_cell(notebooks: Notebooks, tmp_path):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text) for text in (BAR, WORK, "6 * 7, X")]
    )
    with notebooks.opened(notebook) as page:
        page.run_cell(0)
        page.wait_text(0, "rank 0")
        assert page.cell(0).locator(".widget-hprogress .progress-bar").count() == 1
        page.run_cell(1)
        page.wait_text(1, "started")
        page.interrupt()
        page.wait_text(1, "interrupted")
        page.wait_done(1)
        page.run_cell(2)
        page.wait_text(2, r"NameError")
        page.screenshot(tmp_path / "shot.png")
        page.save()
        assert page.console_errors == []
    assert (tmp_path / "shot.png").read_bytes()[:4] == b"\x89PNG"
