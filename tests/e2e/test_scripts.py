"""Scripts run unchanged: what they see is what torchrun lets them see, and what they leave is found by the next run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distmagic.errors import WorkerFailed
from distmagic.outcome.run import Run
from tests import REPOSITORY
from tests.e2e.scripts import run, run_warm
from tests.lab import Lab, wait_until
from tests.lab.waiting import HANG_S

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]

TRAIN = '''\
"""A program as people have them."""
import argparse
import importlib
import importlib.resources
import json
import os
import subprocess
import sys
from multiprocessing import get_context

import helpers
import package.deep

parser = argparse.ArgumentParser()
parser.add_argument("epochs", type=int)
parser.add_argument("--lr", type=float, default=0.1)


def square(x):
    return x * x


if __name__ == "__main__":
    args = parser.parse_args()
    with get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, [2, 3])
    child = [sys.executable, "-c", "import helpers; print(helpers.__file__)"]
    seen = {
        "args": vars(args),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "path": sys.path,
        "file": __file__,
        "name": [__name__, __package__, __spec__.name if __spec__ else None, type(__loader__).__name__],
        "main": sorted(vars(sys.modules["__main__"])),
        "cwd": os.getcwd(),
        "data": open("data/x.txt").read(),
        "beside": open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "conf.yaml")).read(),
        "resource": importlib.resources.files("package").joinpath("table.csv").read_text(),
        "sibling": importlib.import_module("second").NAME,
        "deep": package.deep.NAME,
        "child": subprocess.run(child, capture_output=True, text=True).stdout.strip(),
        "squares": squares,
        "rank": [os.environ["RANK"], os.environ["WORLD_SIZE"]],
    }
    print(json.dumps(seen))
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program, its modules and its data; it is the current directory."""
    folder = tmp_path / "project"
    files = {
        "train.py": TRAIN,
        "helpers.py": "NAME = 'helpers'\n",
        "second.py": "NAME = 'second'\n",
        "conf.yaml": "lr: 1\n",
        "data/x.txt": "some data",
        "package/__init__.py": "",
        # A child that is spawned by the `__main__` of a package does not find what that defines, wherever it runs.
        "package/__main__.py": TRAIN.replace(
            "pool.map(square, [2, 3])", "pool.map(abs, [2, 3])"
        ),
        "package/train.py": TRAIN,
        "package/deep.py": "NAME = 'deep'\n",
        "package/table.csv": "1,2\n",
        "package/conf.yaml": "lr: 2\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    return folder


def seen(run: Run, rank: int = 0) -> dict[str, Any]:
    """Return what the program says that it saw."""
    return json.loads(run.logs(rank, "stdout").splitlines()[-1])


def by_torchrun(lab: Lab, project: Path, words: list[str]) -> dict[str, Any]:
    """Return what the program sees under torchrun itself, in a copy of its folder on a host."""
    host = lab.hosts[0]
    shutil.copytree(project, host.home / "project", dirs_exist_ok=True)
    shell = (
        "cd /home/node/project && exec python3 -m torch.distributed.run --nproc-per-node 1 "
        + " ".join(words)
    )
    done = host.exec(["sh", "-c", shell])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def placed(what: Any, folder: str) -> Any:
    """Return what was seen with the program's folder named alike wherever it was, and without our bundle."""
    text = json.loads(json.dumps(what).replace(folder, "PROJECT"))
    text["path"] = [path for path in text["path"] if "/.distmagic/blobs/" not in path]
    return text


LAYOUT = {
    "configs/a.yaml": "lr: 0.1",
    "data/d.txt": "a line",
    "src/dm_layout/__init__.py": "def f(): return 'of the package'",
    "scripts/look.py": """
import pathlib, subprocess, sys
import dm_layout
print(open(sys.argv[2]).read())
print(pathlib.Path(__file__).resolve().parent.parent.joinpath("data/d.txt").read_text())
print(dm_layout.f(), flush=True)
subprocess.run([sys.executable, "scripts/eval.py", dm_layout.__file__], check=True)
""",
    "scripts/eval.py": "import sys, dm_layout\nprint(dm_layout.__file__ == sys.argv[1])",
}


def test_a_repositorys_usual_layout_is_found_as_it_is_here(
    warm_lab, project, monkeypatch
):
    """Paths count from its root, and the package is on PYTHONPATH or an editable install."""
    for name, text in LAYOUT.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    monkeypatch.syspath_prepend(str(project / "src"))
    text = run_warm(warm_lab, "scripts/look.py --config configs/a.yaml").logs(
        0, "stdout"
    )
    assert text == "lr: 0.1\na line\nof the package\nTrue\n"
    # Of a module that is installed, too, paths count from the current directory.
    (project / "x.json").write_text('{"a": 1}')
    assert '"a": 1' in run_warm(warm_lab, "-m json.tool x.json").logs(0, "stdout")


def test_the_folder_above_is_brought_where_it_is_named(warm_lab, project, monkeypatch):
    (project / "nb").mkdir()
    (project / "nb" / "look.py").write_text(
        "import os\nprint(os.getcwd(), open('../data/x.txt').read())\n"
    )
    monkeypatch.chdir(project / "nb")
    text = run_warm(warm_lab, "--sync .. look.py").logs(0, "stdout")
    assert text == "/home/node/.distmagic/work/look/nb some data\n"


def test_what_a_script_wrote_is_there_in_the_next_run_and_what_is_gone_here_goes_there(
    warm_lab, project
):
    # One snapshot is only there, the other one is sent as well.
    (project / "resume.py").write_text(
        "import os\n"
        "n = int(open('snapshot.txt').read()) if os.path.exists('snapshot.txt') else 0\n"
        "open('snapshot.txt', 'w').write(str(n + 1))\n"
        "sent = int(open('sent.txt').read())\n"
        "open('sent.txt', 'w').write(str(sent * 10))\n"
        "print(n, sent, os.path.exists('data/x.txt'))\n"
    )
    (project / "sent.txt").write_text("7")

    def resumed(options: str = "") -> Run:
        return run_warm(warm_lab, f"{options} resume.py")

    assert resumed().logs(0, "stdout") == "0 7 True\n"
    (project / "data" / "x.txt").unlink()
    second = resumed()
    assert second.logs(0, "stdout") == "1 70 False\n"
    (notice,) = (one for one in second.state.notices if "sent.txt" in one)
    assert notice.startswith("dm1: ")
    assert "--fresh" in notice
    assert resumed("--name other").logs(0, "stdout") == "0 7 False\n"
    assert resumed("--fresh").logs(0, "stdout") == "0 7 False\n"
    assert (
        warm_lab.hosts[0].home / ".distmagic/work/resume/snapshot.txt"
    ).read_text() == "1"


@pytest.mark.quick
def test_a_changed_module_is_the_new_one_at_once(warm_lab, project):
    (project / "which.py").write_text("import helpers\nprint(helpers.NAME)\n")
    # Equally long, and within one second where hosts are warm.
    for name in ("one", "two", "six"):
        (project / "helpers.py").write_text(f"NAME = '{name}'\n")
        assert run_warm(warm_lab, "which.py").logs(0, "stdout") == f"{name}\n"


@pytest.mark.quick
def test_the_traceback_of_a_script_names_its_own_line(warm_lab, project):
    (project / "bad.py").write_text("import sys\n\nraise ValueError(sys.argv[1])\n")
    with pytest.raises(WorkerFailed) as failed:
        run_warm(warm_lab, "bad.py enough")
    assert failed.value.remote_traceback == (
        "Traceback (most recent call last):\n"
        '  File "/home/node/.distmagic/work/bad/bad.py", line 3, in <module>\n'
        "    raise ValueError(sys.argv[1])\n"
        "ValueError: enough"
    )


@pytest.mark.parametrize("line", ["./train.py 50 --lr 0.5", "-m package 50 --lr 0.5"])
def test_a_script_sees_what_torchrun_lets_it_see(ended, project, line):
    theirs = placed(by_torchrun(ended, project, line.split()), "/home/node/project")
    name = line.split()[1] if line.startswith("-m") else "train"
    work = f"/home/node/.distmagic/work/{name}"
    cold = seen(run(ended, line, cold=True))
    assert placed(cold, work) == theirs
    # The second one is forked from a template that was used before.
    for _ in range(2):
        warm = seen(run(ended, line, warm_idle_s=900.0))
    assert placed(warm, work) == theirs


# ---- in a terminal


def in_terminal(lab: Lab, project: Path, *words: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "DISTMAGIC_HOSTS": "dm1:1",
    }
    argv = [sys.executable, "-m", "distmagic.cli", *words]
    return subprocess.Popen(
        argv,
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.quick
def test_the_command_shows_the_run_and_ends_with_its_exit_code(ended, project):
    config = ["--ssh-config", str(ended.ssh_config), "--cold"]
    good = in_terminal(ended, project, "run", *config, "train.py", "50")
    out, err = good.communicate(timeout=HANG_S)
    assert (good.returncode, err) == (0, "")
    assert "done 100%" in out
    assert '[rank 0 dm1] {"args": {"epochs": 50, "lr": 0.1}' in out

    bad = in_terminal(ended, project, "run", *config, "train.py", "many")
    out, err = bad.communicate(timeout=HANG_S)
    assert bad.returncode == 1
    assert "exit code 2" in err or "exited with code 2" in err, err


# It takes longer to save than ranks that do not react are allowed.
ENDLESS = """
import signal, sys, time
def save(*_):
    time.sleep(5)
    print("saved", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
time.sleep(600)
"""


def test_sigterm_ends_the_command_and_its_ranks(ended, project):
    config = ["--ssh-config", str(ended.ssh_config), "--cold"]
    (project / "endless.py").write_text(ENDLESS)
    endless = in_terminal(ended, project, "run", *config, "endless.py")
    assert endless.stdout is not None
    wait_until(lambda: "begun" in endless.stdout.readline(), "the program to begin")
    endless.terminate()
    out, err = endless.communicate(timeout=HANG_S)
    assert (endless.returncode, "Traceback" in err) == (130, False), err
    assert "saved\n" in out
