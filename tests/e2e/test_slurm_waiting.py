"""Allocations of real Slurm that wait for nodes, that nobody uses, or of a command in a terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from distmagic.errors import AllocationEnded
from distmagic.state.model import RunState
from tests import REPOSITORY
from tests.e2e.programs import count
from tests.e2e.runner import as_value
from tests.e2e.slurm_cells import ONE, Noticing, failure, fill, interrupt, run
from tests.lab import wait_until
from tests.lab.slurm import UID, USER, SlurmLab

pytestmark = pytest.mark.needs("lab", "slurm")


class Away(Noticing):
    """Has the controller be away while the job is pending; then its nodes become free."""

    def __init__(self, slurm: SlurmLab, other: str) -> None:
        super().__init__("(Resources)", slurm.stop_controller)
        self._slurm, self._other = slurm, other
        self._is_back = False

    def show(self, state: RunState) -> None:
        """Wait for the words on the controller."""
        super().show(state)
        if "is unknown:" in "".join(state.notices) and not self._is_back:
            self._is_back = True
            self._slurm.start_controller()
            # Which may not answer at once.
            wait_until(
                lambda: not self._slurm.login.exec(["scancel", self._other]).returncode,
                "Slurm to cancel the other job",
                every_s=0.1,
            )


def test_a_pending_allocation_says_why_until_it_is_cancelled_or_begins(slurm, kernel):
    other = fill(slurm)
    screen = Noticing("(Resources)", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(slurm, as_value(count), 0.1, allocation=ONE, screen=screen)
    assert "is pending: " in screen.noticed
    wait_until(lambda: slurm.jobs() == (other,), "only the other job", every_s=0.1)

    def cancel() -> None:
        slurm.command("scancel", *(job for job in slurm.jobs() if job != other))

    somebody = Noticing("Slurm expects it to start at ", cancel)
    error = failure(slurm, as_value(count), 0.1, allocation=ONE, screen=somebody)
    assert isinstance(error, AllocationEnded)
    assert "scancel" in error.message
    when = r"\(Resources\)\. .* \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.$"
    assert re.search(when, somebody.noticed)

    away = Away(slurm, other)
    found = run(slurm, as_value(count), 0.1, allocation=ONE, screen=away)
    assert dict(found.results) == {0: 1}
    assert any(
        notice.startswith("The state of Slurm job ") and " is unknown: dm1: " in notice
        for notice in away.notices
    )
    assert any("being set up" in notice for notice in away.notices)


def test_a_script_of_an_ordinary_user_gets_nodes_and_gives_them_back(
    slurm, kernel, tmp_path
):
    (tmp_path / "data.txt").write_text("some data")
    (tmp_path / "train.py").write_text(
        "import os, sys, torch\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([dist.get_rank() + 1])\n"
        "dist.all_reduce(total)\n"
        "print('seen', os.getuid(), int(total), sys.argv, os.getcwd(), open('data.txt').read())\n"
        "dist.destroy_process_group()\n"
    )
    flags = ["--on", f"slurm:{USER}@dm1", "--nodes", "2"]
    flags += ["--slurm", "cpus-per-task=4", "--name", "script", "--cold"]
    flags += ["--ssh-config", str(slurm.lab.ssh_config)]
    done = subprocess.run(
        [sys.executable, "-m", "distmagic.cli", "run", *flags, "train.py", "50"], capture_output=True, text=True,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, timeout=150, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done
    for rank, name in enumerate(slurm.names):
        line = (
            rf"\[rank {rank} {name}\] seen {UID} 3 \['train.py', '50'\] "
            rf"/home/{USER}/\.distmagic/work/script some data\n"
        )
        assert re.search(line, done.stdout), done.stdout
    wait_until(lambda: not slurm.jobs(), "the allocation to end", every_s=0.1)
