"""What a notebook's ranks find on the hosts: packages with their data, and what lies beside a pasted script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.notebooks.kernel import LiveNotebook, notebook_on

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]

WORK = "/home/node/.distmagic/work/nb"
FILES = {
    "pkg/__init__.py": "",
    "pkg/model.py": "import importlib\nimport importlib.resources\n\n\ndef load():\n"
    "    table = importlib.resources.files('pkg').joinpath('table.csv').read_text()\n"
    "    return table, importlib.import_module('pkg.late').NAME\n",
    "pkg/late.py": "NAME = 'late'\n",
    "pkg/table.csv": "1,2",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("project") / "nb"
    for name, text in FILES.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    return made


@pytest.fixture(scope="module")
def notebook(session_lab: Lab, folder: Path) -> Iterator[LiveNotebook]:
    """A notebook beside these files, whose hosts come from its environment."""
    with notebook_on(session_lab, folder, "dm1:1") as made:
        yield made


def test_a_package_beside_the_notebook_comes_as_files_with_its_data(notebook):
    text = notebook.run("""\
%%distributed
import os, subprocess, sys
import pkg.model

def look():
    child = [sys.executable, "-c", "import pkg.model; print(pkg.model.load())"]
    print(pkg.model.load(), os.getcwd(), os.path.dirname(pkg.model.__file__))
    print("child", subprocess.run(child, capture_output=True, text=True).stdout.strip())
    print(sorted(os.listdir()))

look()
""")
    assert f"[rank 0 dm1] ('1,2', 'late') {WORK} {WORK}/pkg\n" in text
    assert "[rank 0 dm1] child ('1,2', 'late')\n" in text
    assert "[rank 0 dm1] ['pkg']" in text, "what the cell does not import stays here"


def test_a_pasted_script_finds_what_lies_beside_it(notebook, folder):
    """By its `__file__`, and as hydra does by that of a function's code; in a spawned child, too."""
    (folder / "conf.yaml").write_text("lr: 1\n")
    text = notebook.run("""
%%distributed --script --sync .
import inspect
import multiprocessing
from pathlib import Path
def main(name):
    places = Path(__file__), Path(inspect.getfile(main)).absolute()
    return [(place.parent / name).read_text() for place in places]
if __name__ == "__main__":
    assert "places = " in inspect.getsource(main)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(main("conf.yaml"), pool.map(main, ["conf.yaml"]))
    raise SystemExit
""")
    both = ["lr: 1\n", "lr: 1\n"]
    assert f"{both} {[both]}" in str(text)
