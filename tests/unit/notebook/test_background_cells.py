"""`%%distributed --background`: the cell returns at once, and other cells ask and end its run."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

import distmagic
from distmagic import api, cli
from distmagic.errors import UsageError
from distmagic.payload import pack
from distmagic.request.allocation import SlurmRequest
from distmagic.screens import choose
from distmagic.session.background import BackgroundRun
from tests import scenes
from tests.lab.waiting import HANG_S
from tests.unit.notebook.fakes import FakeScreen

CELL = "%%distributed --background --hosts gpu-a:1,gpu-b:1 -o run\nlen('four')"


class Packed:
    """A packed call, which is called here."""

    blobs = ()
    folder = None
    uses: frozenset[str] = frozenset()

    def __init__(self, call, *, title, **_) -> None:
        self.call, self.title = call, title

    def __call__(self) -> object:
        return self.call()


@pytest.fixture
def held(lab, monkeypatch):
    """A lab whose runs go on until the event is set."""
    monkeypatch.setattr(pack, "pack_call", Packed)
    goes_on = lab.session.goes_on = threading.Event()
    yield lab
    goes_on.set()
    lab.session.background.close()


def test_the_cell_returns_while_its_run_goes_on_and_other_cells_run(held):
    assert held.value(CELL) is None
    run = held.shell.user_ns["run"]
    assert isinstance(run, BackgroundRun)
    assert not held.session.asker.can_ask, "nobody is there to answer"
    assert held.value("1 + 1") == 2
    held.session.goes_on, first = None, held.session.goes_on
    assert held.value("%%distributed\nlen([])") == 0, "another cell on these hosts"
    assert not run.done
    first.set()
    assert run.wait(HANG_S) == 4
    assert held.session.screens[0].in_background
    (last,) = held.session.screens[0].finished
    assert [node.host for node in last.nodes] == ["gpu-a", "gpu-b"]


def test_a_run_that_waits_for_devices_is_listed_and_can_be_stopped(
    held, monkeypatch, capsys, golden
):
    held.value(CELL)
    run = held.shell.user_ns["run"]
    held.value("%distributed jobs")
    assert "waiting" not in capsys.readouterr().out
    run.screen.show(replace(scenes.waiting(), job=run.job))
    held.value("%distributed jobs")
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].split()[:2] == [run.job, "waiting"]
    golden(shown)

    asked = []

    def ask(request: str) -> None:
        asked.append(request)
        held.session.goes_on.set()

    monkeypatch.setattr(run.screen, "ask", ask)
    held.value(f"%distributed stop {run.job[:-2]}")  # the beginning of a name will do
    assert asked == ["stop"]
    assert run.done
    assert "stop" not in "".join(held.session.log), "no host has anything of it"
    golden(capsys.readouterr().out)


def test_a_run_without_a_name_is_the_last_run(held):
    run = held.value("%%distributed --background\nlen('four')")
    assert held.shell.user_ns["_run"] is run


def test_its_own_statements_still_fail_the_cell(held):
    error = held.error("%%distributed --background -o run\n1 / 0\nlen('four')")
    assert isinstance(error, ZeroDivisionError)
    assert held.session.reached[0].cancelled
    assert held.session.background.running == ()


def test_a_script_runs_in_the_background_too(held, tmp_path, monkeypatch):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass")
    held.value("%distributed run --background -o run train.py")
    run = held.shell.user_ns["run"]
    assert not run.done
    held.session.goes_on.set()
    assert run.wait(HANG_S).name == "train"


def test_view_shows_it_in_another_cell_without_waiting(held, monkeypatch):
    held.value(CELL)
    run = held.shell.user_ns["run"]
    shown: list[FakeScreen] = []

    def screen_for(shell, *, in_background=False):
        shown.append(FakeScreen(shell, in_background))
        return shown[-1]

    monkeypatch.setattr(choose, "screen_for", screen_for)
    assert held.value(f"%distributed view {run.job}") is None
    assert shown[0].in_background
    assert shown[0].shown[0].job == run.job
    assert "attach" not in " ".join(held.session.log)
    held.session.goes_on.set()
    run.wait(HANG_S)
    assert len(shown[0].finished) == 1


def test_down_leaves_it_its_connections(held):
    held.value(CELL)
    run = held.shell.user_ns["run"]
    error = held.error("%distributed down")
    assert isinstance(error, UsageError)
    assert error.message.startswith(f"{run.job} would lose the connections")
    held.session.goes_on.set()
    run.wait(HANG_S)
    assert held.value("%distributed down") is None


@pytest.mark.parametrize("line", ["%%distributed --background\nlen([])", "%distributed run --background train.py"])  # fmt: skip
def test_in_a_job_whose_nodes_all_run_the_notebook_there_is_no_background(
    lab, monkeypatch, line, golden
):
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    for name, value in {**nodes, "SKYPILOT_NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    error = lab.error(line)
    golden(error)


def test_from_python_it_returns_a_run_that_goes_on(held, monkeypatch, golden):
    monkeypatch.setattr(api, "session", lambda: held.session)
    monkeypatch.setattr(api, "pack_call", Packed)
    run = distmagic.run(len, [1], hosts="gpu-a", background=True)
    assert not run.done
    held.session.goes_on.set()
    assert run.wait(HANG_S) == 1
    with golden.raises(UsageError):
        distmagic.run(len, [], background=True, detach=True)


def test_a_command_in_a_terminal_has_no_background(capsys):
    assert cli.main(["run", "--background", "train.py"]) == 2
    assert "--background is for a notebook" in capsys.readouterr().err


def test_nodes_of_a_scheduler_have_numbers_until_they_are_known(held):
    held.value("%%distributed --background --on slurm --nodes 2 -o run\nlen([])")
    run = held.shell.user_ns["run"]
    held.session.goes_on.set()
    assert run.wait(HANG_S) == 0
    first = held.session.screens[0].shown[0]
    assert [node.host for node in first.nodes] == ["node 1", "node 2"]
    assert held.session.allocations.wanted == SlurmRequest(nodes=2)
