"""A template that loads what ranks had imported: with generated packages, in a process of its own each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from distmagic.remote.engine.preloading import Wishes
from tests import REPOSITORY
from tests.builders.wheels import unpacked

# Imports packages as a successor does; torch is played, because loading it takes seconds.
PROGRAM = """
import json, os, sys, types
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: "gpu" in sys.modules, _is_in_bad_fork=lambda: "fork" in sys.modules)
from distmagic.remote.engine import preloading
preloading.MOST_BYTES = 100_000_000
preloading.ENOUGH_S = float(sys.argv[2])
begun = []
try:
    for package in preloading.load(json.loads(sys.argv[1])):
        begun.append(package)
    why = ""
except preloading.NotForTemplate as refused:
    why = str(refused)
loaded = [name for name in json.loads(sys.argv[1]) if name in sys.modules]
print(json.dumps([begun, loaded, why, "PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ]))
"""


def loaded(
    site: Path, packages: Mapping[str, list[str]], enough_s: float = 60.0
) -> tuple[list[str], list[str], str]:
    """Return which packages were begun, which are loaded then, and why the last one was refused."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(packages), str(enough_s)],
        env={"PYTHONPATH": f"{site}:{REPOSITORY}", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    begun, there, why, is_left = json.loads(done.stdout.splitlines()[-1])
    assert not is_left
    return begun, there, why


def test_only_packages_that_are_installed_are_loaded_and_with_their_modules(tmp_path):
    unpacked(
        tmp_path,
        "good",
        files={
            "good/__init__.py": "import os\nassert os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] == '1'\n",
            "good/deep.py": "from good import made\n",
            "good/made.py": "",
        },
    )
    (tmp_path / "mine.py").write_text("raise SystemExit(7)\n")
    packages = {
        "mine": ["mine"],
        "nowhere": ["nowhere"],
        "good": ["good", "good.deep", "good.made_at_run_time"],
        "good.deep": [],
    }
    begun, there, why = loaded(tmp_path, packages)
    assert (begun, there, why) == (["good"], ["good", "good.deep"], "")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "starts threads"),
        ("import os\nos.environ.get('LOCAL_RANK')", "reads LOCAL_RANK"),
        ("import os\nos.getenv('SLURM_PROCID', '0')", "reads SLURM_PROCID"),
        ("import signal\nsignal.signal(signal.SIGTERM, print)", "handles signals"),
        ("import subprocess\nchild = subprocess.Popen(['true'])", "starts processes"),
        ("kept = bytearray(200_000_000)", "takes more than 0.1 GB with the others"),
        ("import sys, types\nsys.modules['gpu'] = types.ModuleType('gpu')", "uses a GPU"),
        ("import sys, types\nsys.modules['fork'] = types.ModuleType('fork')", "uses a GPU"),
    ],
)  # fmt: skip
def test_a_package_that_would_make_a_fork_differ_is_refused(tmp_path, code, why):
    unpacked(tmp_path, "first")
    unpacked(tmp_path, "bad", files={"bad.py": code})
    unpacked(tmp_path, "last")
    packages = {"first": ["first"], "bad": ["bad"], "last": ["last"]}
    begun, there, found = loaded(tmp_path, packages)
    assert (begun, there, found) == (["first", "bad"], ["first", "bad"], why)


def test_lightning_may_read_its_rank_because_that_is_mended(tmp_path):
    name = "lightning/fabric/utilities/rank_zero.py"
    unpacked(tmp_path, "lightning", files={name: "import os\nos.environ.get('RANK')"})
    modules = ["lightning.fabric.utilities.rank_zero"]
    (tmp_path / "lightning" / "__init__.py").touch()
    assert loaded(tmp_path, {"lightning": modules})[2] == ""


def test_no_further_package_is_begun_when_the_time_is_over(tmp_path):
    unpacked(tmp_path, "good")
    assert loaded(tmp_path, {"good": ["good"]}, -1.0) == ([], [], "")


def test_what_ranks_told_is_kept_and_dependencies_come_first(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))
    told = tmp_path / "imported.json"
    told.write_text(json.dumps(["big", "dep", "dep.x", "big.a"]))
    first = Wishes("k1")
    assert first.packages() == {}
    first.learn(told)
    wanted = {"dep": ["dep", "dep.x"], "big": ["big", "big.a"]}
    assert first.packages() == wanted
    assert list(first.packages()) == ["dep", "big"]
    first.refuse("dep", "starts threads")
    first.done({"big": ["big"]})
    assert first.packages() == {"big": ["big.a"]}
    later = Wishes("k1")  # of another process
    assert later.packages() == {"big": ["big", "big.a"]}
    assert later.refused == {"dep": "starts threads"}
    told.write_text(json.dumps(["new"]))
    later.learn(told)
    later.learn(tmp_path / "nothing")
    assert list(Wishes("k1").packages()) == ["new", "big"]
    assert Wishes("k2").packages() == {}
    (kept,) = (tmp_path / "imports").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.write_text("[]")
    assert Wishes("k1").packages() == {}
    for number in range(21):  # too many tries
        later.refuse(f"bad{number}", "fails")
    assert later.packages() == {}
