"""The first cell of the README, executed as a newcomer does: on this machine, without a named host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.notebooks.kernel import live_notebook

pytestmark = [pytest.mark.timeout(120)]


def test_the_cell_of_the_readme_runs_without_hosts(tmp_path: Path) -> None:
    text = (REPOSITORY / "README.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (cell,) = [snippet for snippet in snippets if snippet.startswith("%%distributed")]
    with live_notebook(tmp_path) as notebook:
        shown = notebook.run(cell)
        assert shown.startswith("done 100% · 1 rank on localhost · took ")
        assert notebook.run("run.results[0] < 0.6, run.metrics[-1]['step'] == 500") == "(True, True)"
