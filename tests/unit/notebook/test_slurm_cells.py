"""Cells on nodes of Slurm, over a fake session: what happens when, and what an interrupt leaves."""

from distmagic.errors import Cancelled, UsageError
from distmagic.notebook.job_tables import aligned
from distmagic.request.allocation import SkyRequest, SlurmRequest
from distmagic.request.hosts import Host
from distmagic.systems.slurm import job_states
from distmagic.systems.slurm.job_states import JobState
from distmagic.systems.slurm.srun_words import source
from tests.builders.sky import Sky
from tests.unit.notebook.fakes import FakeAllocation

CELL = (
    "%%distributed --on slurm:login1 --nodes 2\nseen = 1\ndef f():\n    return 5\nf()"
)


def test_the_job_is_submitted_the_cell_runs_and_then_it_waits(lab):
    assert lab.value(CELL) == 5
    assert lab.session.log == ["allocate", "wait", "reach", "launch"]
    assert lab.shell.user_ns["seen"] == 1
    assert [host.name for host in lab.session.hosts] == ["a1", "a2"]
    assert lab.session.screen.notices == ["Slurm job 17 is pending."]
    assert (
        lab.session.allocations.wanted.login,
        lab.session.allocations.wanted.nodes,
    ) == ("login1", 2)


def test_nodes_that_are_held_are_reached_at_once(lab):
    lab.value(CELL)
    lab.session.log.clear()
    assert lab.value(CELL) == 5
    assert lab.session.log == ["allocate", "reach", "launch"]


def test_a_mistake_in_the_cell_gives_a_pending_job_back(lab):
    assert isinstance(
        lab.run(CELL.replace("seen = 1", "1 / 0")).error_in_exec, ZeroDivisionError
    )
    assert lab.session.log == ["allocate", "end of the allocation"]


def test_an_interrupt_while_it_waits_gives_a_pending_job_back(lab):
    request = SlurmRequest(nodes=2)
    lab.session.allocations.given = FakeAllocation(
        lab.session.log, request, failure=KeyboardInterrupt()
    )
    assert isinstance(lab.run(CELL).error_in_exec, Cancelled)
    assert lab.session.log == ["allocate", "wait", "end of the allocation"]


def test_a_cell_that_is_no_python_asks_for_nothing(lab):
    assert isinstance(lab.run("%%distributed --on slurm\nf(").error_in_exec, UsageError)
    assert lab.session.log == []


def test_a_dry_run_submits_nothing(lab, capsys):
    lab.value(CELL.replace("--nodes 2", "--nodes 2 --dry-run"))
    assert "--nodes=2" in capsys.readouterr().out
    assert lab.session.log == []


def test_jobs_are_looked_for_on_nodes_that_are_held(lab):
    lab.session.allocations.hosts = (Host(name="a1", allocation=source("", "17")),)
    lab.value("%distributed jobs")
    assert [host.name for host in lab.session.hosts] == ["a1"]
    lab.value("%distributed hosts gpu-a")
    lab.value("%distributed jobs")
    assert [host.name for host in lab.session.hosts] == ["gpu-a", "a1"]


def test_the_hosts_of_a_cluster_are_taken(lab, capsys):
    lab.value("%distributed allocations sky:mine")
    assert lab.session.allocations.wanted == SkyRequest(name="mine")
    assert lab.session.log == ["allocate", "wait"]
    assert "cluster mine of SkyPilot: a1, a2\n" in capsys.readouterr().out


def test_clusters_are_listed_and_taken_down_by_name(
    lab, capsys, tmp_path, monkeypatch, golden
):
    skypilot = Sky(tmp_path, monkeypatch)
    lab.value("%distributed allocations sky")
    assert capsys.readouterr().out == "SkyPilot has no cluster\n"
    skypilot.has("mine")
    skypilot.has("other", status="STOPPED")
    lab.session.allocations.down = "Terminating cluster other...done."
    lab.session.allocations.clusters = ("mine",)
    lab.value("%distributed allocations sky")
    golden(capsys.readouterr().out)
    lab.value("%distributed allocations")
    golden(capsys.readouterr().out)
    for line in ("--cluster other", "--cluster=other"):
        lab.value(f"%distributed down {line}")
        assert capsys.readouterr().out == "Terminating cluster other...done.\n"
    error = lab.run("%distributed down --cluster").error_in_exec
    assert isinstance(error, UsageError)


def test_allocations_are_listed_and_one_is_taken(lab, capsys):
    lab.session.allocations.states = (
        JobState(
            job="17",
            state="RUNNING",
            nodes=("a1",),
            left="9:00",
            comment="distmagic:me",
        ),
    )
    lab.value("%distributed allocations slurm:login1")
    assert "17   running  a1     9:00       me" in capsys.readouterr().out
    lab.value("%distributed allocations slurm:login1:17")
    assert "Slurm job 17: a1, a2" in capsys.readouterr().out
    assert lab.session.allocations.wanted.job == "17"
    assert lab.session.log == ["allocations of login1", "allocate", "wait"]


def test_the_table_of_allocations(golden):
    states = [
        JobState(
            job="17",
            state="RUNNING",
            nodes=("a1", "a2"),
            left="9:00",
            comment="distmagic:me:/a.ipynb",
        ),
        JobState(
            job="18",
            state="PENDING",
            reason="Resources",
            left="30:00",
            comment="distmagic:you",
        ),
    ]
    rows = job_states.listing(states, {"17"})
    (nothing,) = job_states.listing([], set())
    golden(*aligned(rows).splitlines(), *nothing)


def test_the_doctor_asks_the_scheduler_before_it_connects(lab, monkeypatch):
    """A scheduler may take its time, and connections would wait for it."""

    def fail(*_: object) -> None:
        raise UsageError("no answer.", "")

    monkeypatch.setattr(lab.session.allocations, "findings", fail, raising=False)
    lab.value("%distributed hosts gpu-a,gpu-b")
    lab.session.log.clear()
    error = lab.run("%distributed doctor").error_in_exec
    assert "no answer" in str(error)
    assert "reach" not in lab.session.log
