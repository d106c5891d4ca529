"""A script runs on hosts whose Python is of another minor version than the notebook's machine; a cell's function is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.lab import Lab

pytestmark = [pytest.mark.needs("lab"), pytest.mark.timeout(180)]

_MINORS = [minor for minor in range(10, 15) if minor != sys.version_info[1]]


def another_python() -> str:
    """Return a Python of another minor version on this machine. It needs no package of its own, nor torch."""
    for minor in _MINORS:
        places = Path.home().glob(f".pyenv/versions/*/bin/python3.{minor}")
        for found in (*map(str, places), shutil.which(f"python3.{minor}")):
            if found and subprocess.run([found, "-c", ""], check=False).returncode == 0:
                return found
    pytest.skip("there is no other Python on this machine")


def run_there(lab: Lab, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program by another Python, which has our packages that are no binaries."""
    site = next(path for path in sys.path if path.endswith("site-packages"))
    path = os.pathsep.join((str(REPOSITORY), site))
    env = {**os.environ, "PYTHONPATH": path, "SSH_CONFIG": str(lab.ssh_config)}
    return subprocess.run(
        [another_python(), *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_script_runs_on_hosts_with_another_python(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "print('rank', dist.get_rank(), sys.version_info[:2], sys.argv[1:])\n"
        "dist.destroy_process_group()\n"
    )
    ssh = ("--ssh-config", str(lab.ssh_config), "--ssh-command", "ssh")
    line = ("run", "--hosts", "dm1:1,dm2:1", *ssh, "--warm-idle", "0", "train.py", "7")
    done = run_there(lab, tmp_path, "-m", "distmagic.cli", *line)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} {sys.version_info[:2]} ['7']" in done.stdout
    lab.assert_clean()


def test_a_function_is_refused_and_a_script_is_named(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "call.py").write_text(
        "import os, distmagic\n"
        "distmagic.run(lambda: 1, hosts='dm1', ssh_config=os.environ['SSH_CONFIG'], ssh_command='ssh')\n"
    )
    done = run_there(lab, tmp_path, "call.py")
    assert done.returncode == 1
    assert "functions travel only between equal minor versions." in done.stderr
    assert (
        "A script runs on any of them, and so does a cell with --whole." in done.stderr
    )
    lab.assert_clean()
