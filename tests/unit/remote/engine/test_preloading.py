"""A template that loads what the texts of jobs import: with generated packages, in a process of its own each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.builders.wheels import unpacked

# Loads packages as a template does; torch is played, because loading it takes seconds.
PROGRAM = """
import json, os, sys, time, types
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: "gpu" in sys.modules, _is_in_bad_fork=lambda: "fork" in sys.modules)
from distmagic.remote.engine import preloading
preloading.MOST_BYTES = 100_000_000
preloading.SLOW_S = 1 if "hangs" in sys.argv[1:] else 60
names = preloading.Preloading()
names.want(sys.argv[1:])
names.step(is_idle=False)
assert not names.loaded and not names.refused
while names.has_work:
    names.step(is_idle=True)
names.want(sys.argv[1:])
assert not names.has_work
there = [name for name in sys.argv[1:] if name in sys.modules]
print(json.dumps([sorted(names.loaded), there, names.refused, "PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ]))
"""


def loaded(site: Path, *names: str) -> tuple[list[str], list[str], dict[str, str]]:
    """Return which packages are loaded, which of these modules are, and what was refused."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        env={"PYTHONPATH": f"{site}:{REPOSITORY}", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    packages, there, refused, is_left = json.loads(done.stdout.splitlines()[-1])
    assert not is_left
    return packages, there, refused


def test_only_packages_that_are_installed_are_loaded_and_with_their_modules(tmp_path):
    lazy = "def __getattr__(name):\n    import good.lazy\n    return 1\n"
    begin = "import os\nassert os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] == '1'\n"
    unpacked(
        tmp_path,
        "good",
        files={
            "good/__init__.py": begin + lazy,
            "good/deep.py": "from good import made\n",
            "good/made.py": "",
            "good/lazy.py": "",
        },
    )
    (tmp_path / "mine.py").write_text("raise SystemExit(7)\n")
    names = ("good.deep", "mine", "nowhere", "good.Lazy", "json", "torch.nn")
    packages, there, refused = loaded(tmp_path, *names, "good.lazy")
    assert (packages, refused) == (["good"], {})
    assert there == ["good.deep", "json", "good.lazy"]


def test_a_package_may_remove_the_variable_that_is_set_for_torch(tmp_path):
    code = "import os\ndel os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']\n"
    unpacked(tmp_path, "remover", files={"remover.py": code})
    assert loaded(tmp_path, "remover") == (["remover"], ["remover"], {})


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "starts threads"),
        ("import os\ndef rank():\n    return os.environ.get('LOCAL_RANK')\nrank()", "names variables of a rank"),
        ("import os\nfor name in ('SLURM_PROCID',):\n    os.getenv(name)", "names variables of a rank"),
        ("import signal\nsignal.signal(signal.SIGTERM, print)", "handles signals"),
        ("import subprocess\nchild = subprocess.Popen(['sleep', '60'])", "starts processes"),
        ("kept = bytearray(200_000_000)", "takes more than 1.5 GB with the others"),
        ("import sys, types\nsys.modules['gpu'] = types.ModuleType('gpu')", "uses a GPU"),
        ("import sys, types\nsys.modules['fork'] = types.ModuleType('fork')", "uses a GPU"),
        ("raise SystemExit(0)", "can't be imported"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "ends the process"),
    ],
)  # fmt: skip
def test_a_package_that_would_make_a_fork_differ_is_refused(tmp_path, code, why):
    unpacked(tmp_path, "first")
    unpacked(tmp_path, "bad", files={"bad.py": code})
    unpacked(tmp_path, "last")
    found = loaded(tmp_path, "first", "bad", "last")
    assert found == (["first", "last"], ["first", "last"], {"bad": why})


def test_an_import_that_hangs_is_ended(tmp_path):
    unpacked(tmp_path, "hangs", files={"hangs.py": "import signal\nsignal.pause()"})
    refused = {"hangs": "takes longer than 60 s"}
    assert loaded(tmp_path, "hangs") == ([], [], refused)


def test_lightning_may_read_its_rank_because_that_is_mended(tmp_path):
    reads = "import os\nos.environ.get('RANK')"
    name = "lightning/fabric/utilities/rank_zero.py"
    unpacked(tmp_path, "lightning", files={"lightning/__init__.py": "", name: reads})
    module = "lightning.fabric.utilities.rank_zero"
    assert loaded(tmp_path, module) == (["lightning"], [module], {})
