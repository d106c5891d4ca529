"""What a notebook's ranks find on the hosts: packages with their data, folders, scripts, and what runs before left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.notebooks.kernel import LiveNotebook, notebook_on

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]

WORK = "/home/node/.distmagic/work/nb"
FILES = {
    "train.py": "import sys, helper\nprint(sys.argv, helper.NAME, open('data/x.txt').read())\n",
    "helper.py": "NAME = 'helper'\n",
    "data/x.txt": "some data",
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


def test_a_folder_is_brought_and_kept_for_the_cells_after_it(notebook, folder):
    look = "\ndef look():\n    return open('data/x.txt').read()\nlook()\n"
    assert "done 100%" in notebook.run(f"%%distributed --sync . -o run{look}")
    assert notebook.run("run.results[0]") == "'some data'"
    (folder / "data" / "x.txt").write_text("new data")
    notebook.run(f"%%distributed -o run{look}")
    assert notebook.run("run.results[0]") == "'some data'"
    notebook.run(f"%%distributed -o run --sync data{look}")
    assert notebook.run("run.results[0]") == "'new data'"
    refused = notebook.fail(f"%%distributed --sync nowhere{look}")
    assert "UsageError: --sync nowhere: " in refused
    missing = notebook.fail(f"%%distributed --fresh{look}")
    assert "FileNotFoundError: " in missing


def test_a_script_is_run_by_a_line(notebook, folder):
    (folder / "data" / "x.txt").write_text("some data")
    text = notebook.run("%distributed run --nproc-per-node 2 -o run train.py 50 -b 32")
    for rank in range(2):
        assert (
            f"[rank {rank} dm1] ['train.py', '50', '-b', '32'] helper some data" in text
        )
    assert notebook.run("run.state.phase") == "'done'"
    assert notebook.run("'_run' in globals()") == "False"
    assert "cd ~/.distmagic/work/" in notebook.run(
        "%distributed run --dry-run train.py 5"
    )
    refused = notebook.fail("%distributed run nothing.py")
    assert "UsageError: There is no script nothing.py" in refused


def test_a_cell_is_run_as_a_script_with_arguments(notebook):
    text = notebook.run("""\
%%distributed --script -- 50 --lr 0.5
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("epochs", type=int)
parser.add_argument("--lr", type=float)
if __name__ == "__main__":
    print(vars(parser.parse_args()))
""")
    assert "[rank 0 dm1] {'epochs': 50, 'lr': 0.5}" in text


def test_what_is_kept_is_told_and_removed(notebook, session_lab):
    notebook.run("%%distributed\nopen('left', 'w').write('x' * 2_000_000)\n")
    shown = notebook.run("%distributed clean")
    kept = r"~/.distmagic/work/nb on dm1 \(2.0 MB, "
    assert re.search(kept + r"last used \d+ s ago\)\n", shown)
    assert re.search(f"removed .*{kept}", notebook.run("%distributed clean all"))
    assert "nb" not in session_lab.hosts[0].listdir("/home/node/.distmagic/work")


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
