"""`%distributed run`: words, names that the run gets, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from distmagic.errors import Cancelled, UsageError, WorkerFailed
from distmagic.request.allocation import SlurmRequest
from tests.unit.notebook.fakes import FakeAllocation


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    made = tmp_path / "project"
    made.mkdir()
    (made / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(made)
    return made


def test_a_script_is_run_with_the_flags_before_its_name(lab, project):
    found = lab.value("%distributed run --hosts gpu-a:2 --fresh train.py 50 --lr 0.1")
    assert [(host.name, host.slots) for host in lab.session.hosts] == [("gpu-a", 2)]
    assert lab.session.spec.fresh
    assert found is lab.session.payload
    assert (found.script, found.folder, found.name) == (
        project / "train.py",
        project,
        "train",
    )
    assert lab.shell.user_ns["_run"] is found


def test_the_run_gets_a_name_also_when_it_fails(lab, project):
    assert lab.value("%distributed run -o run train.py") is None
    assert lab.shell.user_ns["run"] is lab.session.payload
    assert "_run" not in {**lab.shell.user_ns, **lab.shell.user_ns_hidden}, (
        "as after a cell"
    )
    failure = WorkerFailed("rank 0 raised ValueError.")
    failure.run = "a failed run"
    lab.session.failure = failure
    assert lab.error("%distributed run -o other train.py") is failure
    assert (lab.shell.user_ns["other"], lab.session.variable) == (
        "a failed run",
        "other",
    )


def test_a_script_that_is_not_there_gives_the_hosts_up_again(lab, project):
    error = lab.error("%distributed run nothing.py")
    assert isinstance(error, UsageError)
    assert lab.session.reached[-1].cancelled
    assert lab.session.log == ["reach"]


def test_a_script_runs_on_nodes_of_slurm(lab, project):
    found = lab.value("%distributed run --on slurm:login1 --nodes 2 train.py 50")
    assert found.script == project / "train.py"
    assert lab.session.log == ["allocate", "wait", "reach", "launch"]
    assert (
        lab.session.allocations.wanted.login,
        lab.session.allocations.wanted.nodes,
    ) == ("login1", 2)
    assert [host.name for host in lab.session.hosts] == ["a1", "a2"]
    assert lab.session.screen.notices == ["Slurm job 17 is pending."]


def test_an_interrupt_while_nodes_are_awaited_gives_them_back(lab, project):
    lab.session.allocations.given = FakeAllocation(
        lab.session.log, SlurmRequest(nodes=2), failure=KeyboardInterrupt()
    )
    assert isinstance(
        lab.error("%distributed run --on slurm --nodes 2 train.py"), Cancelled
    )
    assert lab.session.log == ["allocate", "wait", "end of the allocation"]


def test_a_dry_run_submits_nothing(lab, project, capsys):
    lab.value("%distributed run --on slurm --nodes 2 --dry-run train.py")
    assert "--nodes=2" in capsys.readouterr().out
    assert lab.session.log == []


def test_help_and_dry_run_start_nothing(lab, project, capsys):
    lab.value("%distributed run --help")
    assert "%distributed run [FLAGS] SCRIPT" in capsys.readouterr().out
    lab.value("%distributed run --nproc-per-node 2 --dry-run train.py")
    assert capsys.readouterr().out == "would run 2\n"
    assert "launch" not in lab.session.log


def test_a_cell_that_is_a_script_gets_its_arguments(lab):
    lab.value("%%distributed --script -- 50 --lr 0.1\nimport sys\nprint(sys.argv)")
    assert lab.packed["argv"] == ("cell.py", "50", "--lr", "0.1")
    lab.value("%%distributed --whole\nprint(1)")
    assert lab.packed["argv"] == ()
