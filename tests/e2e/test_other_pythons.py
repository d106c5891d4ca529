"""Scripts, functions and cells run on hosts whose Python is of another minor version than the notebook's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.builders.pythons import another_python
from tests.lab import Lab

pytestmark = pytest.mark.needs("lab")


def run_there(
    lab: Lab, folder: Path, *words: str, python: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a program by another Python, which has our packages that are no binaries."""
    site = next(path for path in sys.path if path.endswith("site-packages"))
    path = os.pathsep.join((str(REPOSITORY), site))
    env = {**os.environ, "PYTHONPATH": path, "SSH_CONFIG": str(lab.ssh_config)}
    return subprocess.run(
        [python or another_python(), *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_script_runs_on_hosts_with_another_python(lab, tmp_path):
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


NOTEBOOK = """
import os
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()


def run(text):
    shell.run_cell(text).raise_error()


run("%load_ext distmagic")
run('''
from dataclasses import dataclass

@dataclass
class Config:
    steps: int = 3

    @classmethod
    def of(cls, steps):
        return cls(steps)

def halved(x):
    return x / 2
''')
FLAGS = f"--hosts dm1:1,dm2:1 --ssh-config {os.environ['SSH_CONFIG']} --ssh-command ssh --warm-idle 0"
run(f"%%distributed -o run {FLAGS}" + '''
class Best(Exception):
    pass

def train(config):
    import sys, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=halved(0.2))
    for step in range(config.steps):
        optimizer.zero_grad()
        model(torch.ones(8, 4) * (dist.get_rank() + 1)).square().mean().backward()
        optimizer.step()
    weights = [p.sum().item() for p in model.module.parameters()]
    print("rank", dist.get_rank(), sys.version_info[:2])
    dist.destroy_process_group()
    return config, weights, [x for x in (lambda y: [y])(Best("b"))]

train(Config.of(steps=4))
''')
run('''
mine, other = run.results[0], run.results[1]
assert mine[0] == Config(4) and type(mine[0]) is Config, mine
assert mine[1] == other[1], (mine, other)
assert type(mine[2][0]) is Best
exec("def hidden(): return 1")
''')
failed = shell.run_cell(f"%%distributed {FLAGS}" + '''
def fail():
    return 1 / 0

fail()
''')
assert "return 1 / 0" in failed.error_in_exec.remote_traceback, failed.error_in_exec
refused = shell.run_cell(f"%%distributed {FLAGS}\\nhidden()")
print("REFUSED", refused.error_in_exec)
run("def doubled(x):\\n    return 2 * x")
run(f"%%ranks {FLAGS}\\ndoubled(4)")
run("ranks['twice'] = doubled")
run("%%ranks\\ntwice(8)")
run("%distributed end ranks")
"""


def test_cells_run_on_hosts_with_another_python(lab, tmp_path):
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    python = another_python((12, 13))  # on which the tests' IPython runs
    done = run_there(lab, tmp_path, "notebook.py", python=python)
    assert done.returncode == 0, done.stderr + done.stdout
    for rank in (0, 1):
        assert f"rank {rank} {sys.version_info[:2]}" in done.stdout
    ours = ".".join(map(str, sys.version_info[:2]))
    assert "ranks 0-1: 8\n" in done.stdout
    assert "ranks 0-1: 16\n" in done.stdout
    assert f"REFUSED `hidden` can't travel to dm1 (Python {ours})" in done.stdout
    lab.assert_clean()
