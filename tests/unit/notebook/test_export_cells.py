"""`%%distributed --export` in a real shell; what it wrote is run, where that needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distmagic.errors import UsageError
from distmagic.notebook import magic
from tests.builders.shell import completed


@pytest.fixture
def cells(shell, tmp_path, monkeypatch):
    """Return a function that runs a cell in a shell that has the extension, as it is."""
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    magic.load_ipython_extension(shell)

    def run(text: str) -> object:
        done = shell.run_cell(text, store_history=True)
        if done.error_in_exec or done.error_before_exec:
            raise done.error_in_exec or done.error_before_exec
        return done.result

    return run


def start(program: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a program as rank 0 of 1 by a Python that finds nothing of this project but what the program brings."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-I", "-c", _RUN, str(program), *args]
    return completed(command, cwd=program.parent, env=clean, check=False)


# -I keeps the environment and the current directory out; site-packages stay, without what is imported from a checkout.
_RUN = """
import runpy, sys
sys.argv[:] = sys.argv[1:]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
sys.path[:] = [path for path in sys.path if not path.endswith("distmagic")]
sys.path.insert(0, __import__("os").path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_cell_becomes_a_plain_program(cells, tmp_path, capsys, golden):
    cells("import json\nSIZE = 3")
    assert (
        cells(
            "%%distributed --export slurm out --nodes 2\ndef f():\n    print(json.dumps(SIZE))\nf()"
        )
        is None
    )
    told = capsys.readouterr().out
    golden(told)
    program = tmp_path / "out/program/cell.py"
    assert program.read_text().startswith("import json\n\nSIZE = 3\n")
    assert start(program).stdout == "3\n"
    assert "#SBATCH --nodes=2\n" in (tmp_path / "out/job.sbatch").read_text()


def test_a_cell_that_uses_more_goes_as_the_pickled_call(cells, tmp_path, capsys):
    cells(
        "class Model:\n    def __init__(self, x):\n        self.x = x\nmodel = Model(bytes(5_000_000))"
    )
    cells(
        "%%distributed --export slurm out\ndef f(n):\n    print(len(model.x) + n)\nf(1)"
    )
    assert "pickled (model is of another cell)" in capsys.readouterr().out
    program = tmp_path / "out/program/run_call.py"
    assert "run_call.py" in (tmp_path / "out/node.sh").read_text()
    done = start(program)
    assert (done.stdout, done.stderr, done.returncode) == ("5000001\n", "", 0)
    modes = {
        path.name: path.stat().st_mode & 0o777
        for path in program.parent.iterdir()
        if path.is_file()
    }
    for_all = {"run_call.py", "run_node.py", "run_rank.py", "distmagic.zip"}
    assert {name for name in modes if modes[name] == 0o644} == for_all
    assert {name for name in modes if modes[name] == 0o600} > {"call", "code.zip"}


@pytest.mark.parametrize(
    ("system", "mode"),
    [("slurm", 0o600), ("skypilot", 0o600), ("osmo", 0o600), ("sing", 0o644)],
)
def test_a_pickled_call_with_a_secret_is_only_for_its_owner_but_in_an_image(
    cells, tmp_path, system, mode
):
    """An image may run as another user, and all ranks read the call."""
    cells("class Client:\n    pass\nclient = Client()\nclient.token = 'hf_' + 'x' * 9")
    cells(f"%%distributed --export {system} out\nprint(client)")
    found = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    secret = {
        path.name: path.stat().st_mode & 0o777
        for path in found
        if b"hf_xxxxxxxxx" in path.read_bytes()
    }
    assert "call" in secret
    assert set(secret.values()) == {mode}
    for path in found:  # OSMO's workflows hold all files of the program
        if path.name.startswith("workflow"):
            assert path.stat().st_mode & 0o777 == mode


def test_functions_and_classes_of_other_cells_come_along(cells, tmp_path):
    cells("import json\nclass Model:\n    size = 3")
    cells("def helper():\n    return json.dumps(Model.size)")
    cells("%%distributed --export slurm out\nprint(helper())")
    assert start(tmp_path / "out/program/cell.py").stdout == "3\n"


def test_a_pickled_call_that_fails_shows_the_lines_of_the_cell(cells, tmp_path):
    cells("value = object()")
    cells("%%distributed --export slurm out\ndef f():\n    return value, 1 / 0\nf()")
    done = start(tmp_path / "out/program/run_call.py")
    assert done.returncode == 1
    assert "return value, 1 / 0" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "exported.py" not in done.stderr


def test_a_program_that_reports_brings_the_part_of_distmagic_that_it_needs(
    cells, tmp_path
):
    cells("import distmagic")
    cells(
        "%%distributed --export slurm out\ndef f():\n    distmagic.report(step=1)\n    print(distmagic.__file__)\nf()"
    )
    out = tmp_path / "out"
    assert (
        'export PYTHONPATH="$PWD"/program/distmagic.zip'
        in (out / "node.sh").read_text()
    )
    assert "DISTMAGIC_SECRET=" in (out / "environment.sh").read_text()
    assert (out / "environment.sh").stat().st_mode & 0o777 == 0o600
    command = [
        "bash",
        "-c",
        "cd .. && . ./environment.sh && export PYTHONPATH=$PWD/program/distmagic.zip && exec python program/cell.py",
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = completed(command, cwd=out / "program", env={"PATH": path}, check=False)
    assert done.stdout.startswith(str(out / "program/distmagic.zip")), done.stderr


def test_a_command_with_a_value_brings_the_part_of_distmagic_that_it_needs(
    cells, tmp_path
):
    cells("%%ranks --export slurm out\nx = 3\n!echo is {x}")
    assert (tmp_path / "out/program/distmagic.zip").exists()
    assert "PYTHONPATH=" in (tmp_path / "out/node.sh").read_text()


def test_local_modules_come_along(cells, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_local_part.py").write_text("VALUE = 5\n")
    cells(
        "%%distributed --export slurm out\nimport my_local_part\ndef f():\n    print(my_local_part.VALUE)\nf()"
    )
    (tmp_path / "my_local_part.py").unlink()
    assert start(tmp_path / "out/program/cell.py").stdout == "5\n"


def test_a_folder_to_sync_comes_along_where_the_cell_finds_it(cells, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("here")
    cells(
        "%%distributed --export slurm out --sync data\ndef f():\n    print(open('data/a.txt').read())\nf()"
    )
    assert start(tmp_path / "out/program/cell.py").stdout == "here\n"


def test_a_script_of_a_cell_gets_its_arguments(cells, tmp_path):
    cells(
        "%%distributed --export slurm out --script -- 1 'two words'\nimport sys, json\nprint(json.dumps(sys.argv[1:]))"
    )
    node = (tmp_path / "out/node.sh").read_text()
    assert "    run_rank.py cell.py 1 'two words'\n" in node
    assert json.loads(
        start(tmp_path / "out/program/cell.py", "1", "two words").stdout
    ) == ["1", "two words"]


def test_a_script_comes_with_its_folder_and_without_earlier_exports(
    cells, tmp_path, capsys
):
    (tmp_path / "part.txt").write_text("here")
    (tmp_path / "train.py").write_text(
        "import sys\nprint(open('part.txt').read(), sys.argv[1:])\n"
    )
    cells("%distributed run --export slurm out --name 'first' train.py a")
    cells("%distributed run --export torchrun other train.py b")
    cells("%distributed run --export slurm out train.py --lr 1")
    files = {
        str(path.relative_to(tmp_path / "out"))
        for path in (tmp_path / "out/program").rglob("*")
        if path.is_file()
    }
    assert {"program/part.txt", "program/train.py"} <= files
    assert not any("out" in name or "other" in name for name in files)
    assert "    run_rank.py train.py --lr 1\n" in (tmp_path / "out/node.sh").read_text()
    assert "#SBATCH --job-name=train\n" in (tmp_path / "out/job.sbatch").read_text()
    assert start(tmp_path / "out/program/train.py", "x").stdout == "here ['x']\n"


@pytest.mark.parametrize(
    "line",
    [
        "--export slurn d",
        "--export slurm",
        "--export slurm d --detach",
        "--export slurm d --devices 0,1",
        "--export slurm d --dry-run",
        "--export slurm d --on slurm",
        "--export slurm d --hosts a,b",
        "--export torchrun d --partition x",
        "--export slurm ~no-such-user/d",
        "--export slurm d --python a=/x",
        "--export slurm d --image 'a b'",
        "--image x",
    ],
)  # fmt: skip
def test_lines_that_can_not_be(cells, tmp_path, line, golden):
    with golden.raises(UsageError):
        cells(f"%%distributed {line}\ndef f(): pass\nf()")
    assert not (tmp_path / "d").exists()


def test_the_class_of_a_cell_that_ran_again_is_exported(cells, shell, monkeypatch):
    # As in a kernel: a cell's file name depends only on its text.
    monkeypatch.setattr(
        shell.compile, "get_code_name", lambda raw, *_: f"{abs(hash(raw))}.py"
    )
    for size in (1, 2, 1):
        cells(f"class Model:\n    size = {size}")
    cells("%%distributed --export slurm out\nprint(Model.size)")
    assert "size = 1" in Path("out/program/cell.py").read_text()
