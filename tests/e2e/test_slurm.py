"""Real Slurm: a cell's hosts are the nodes of an allocation, reached through a log-in node. All runs share one here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest

import distmagic
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import Cancelled, Unreachable
from distmagic.state.model import RunState
from distmagic.systems.slurm.srun_words import STEP_OPTIONS
from tests.e2e import runner
from tests.e2e.programs import count, fail_at_first
from tests.e2e.runner import Watch, all_reduce, as_value, at_work
from tests.e2e.slurm_cells import HELD, Held, failure, interrupt, kill, ours, replaced
from tests.lab import wait_until
from tests.lab.slurm import LOOK_S, SlurmLab

pytestmark = pytest.mark.needs("lab", "slurm")


def is_forked_from_a_template() -> bool:
    """Whether this process or one above it is what a host keeps loaded."""
    import os

    pid = os.getpid()
    while pid > 1:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read().endswith(b"\0template\0"):
                return True
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return False


@pytest.mark.quick
def test_the_next_cell_starts_in_the_same_allocation_and_warm(held):
    first = held.run(as_value(all_reduce), nproc_per_node=2)
    where = [first.results[rank]["host"] for rank in range(4)]
    assert where == ["dm2", "dm2", "dm3", "dm3"]
    assert {float(first.results[rank]["total"]) for rank in range(4)} == {6.0}
    assert [node.host for node in first.state.nodes] == list(held.slurm.names)
    (job,) = held.slurm.jobs()
    second = held.run(as_value(is_forked_from_a_template), nproc_per_node=2)
    assert held.slurm.jobs() == (job,)
    assert dict(second.results) == dict.fromkeys(range(4), True)


def test_ranks_see_nothing_of_the_keepers_task_and_their_jobs_number(held):
    def variables() -> tuple[list[str], str, str]:
        import os

        odd = (
            "SLURM_PROCID",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_NTASKS",
            "SLURM_STEP_ID",
            "PMI_RANK",
        )
        return (
            [name for name in odd if name in os.environ],
            os.environ["SLURM_JOB_ID"],
            os.environ["CUDA_VISIBLE_DEVICES"],
        )

    found = held.run(as_value(variables))
    (job,) = held.slurm.jobs()
    assert dict(found.results) == {0: ([], job, "0,1"), 1: ([], job, "0,1")}


def test_the_doctor_names_a_node_that_slurm_takes_out_of_use(held):
    held.run(as_value(all_reduce))
    (allocation,) = held.kernel.allocations.alive
    node = held.slurm.names[1]
    asker = NotebookAsker(can_ask=False)
    of_node = ("scontrol", "update", f"nodename={node}")
    held.slurm.command(*of_node, "state=drain", "reason=bad fan")
    try:
        (finding,) = held.kernel.allocations.findings(allocation.hosts, asker)
    finally:
        held.slurm.command(*of_node, "state=resume")
    assert (finding.host, finding.check) == (node, "Slurm")
    assert "draining. Its reason: bad fan" in finding.evidence
    assert held.kernel.allocations.findings(allocation.hosts, asker) == []


def test_a_sweep_has_a_run_at_a_time_on_each_node_of_one_allocation(held):
    sweep = distmagic.sweep(
        as_value(fail_at_first),
        {"lr": [0.1, 0.2], "seed": range(2)},
        allocation=HELD,
        access=runner.access(held.slurm.lab, warm_idle_s=60.0),
        name="s",
    )
    sweep.wait()
    assert sorted(sweep.failed) == ["s-1", "s-3"], sweep.failed
    sweep.rerun()
    sweep.wait()
    assert sweep.failed == {}
    found = [run.results[0][:3] for run in sweep.runs.values()]
    assert found == [(0.1, 0, 1), (0.1, 1, 1), (0.2, 0, 1), (0.2, 1, 1)]
    hosts = {node.host for run in sweep.runs.values() for node in run.state.nodes}
    assert hosts == set(held.slurm.names)
    assert len(held.slurm.jobs()) == 1


# ---- sruns that are killed


def test_sruns_that_are_killed_end_no_run_and_leave_no_step(held):
    """An srun is two processes; the second cancels the step when the first is gone."""
    login = held.slurm.login

    def kill_them() -> None:
        sruns = ours(login, "usher", "srun")
        both = {one.pid for one in sruns}
        kill(login, [one for one in sruns if one.ppid not in both])

    _goes_on_after(held, kill_them)


def _goes_on_after(held: Held, kill_them: Callable[[], object]) -> None:
    """Kill all connections in the middle of a run: it goes on, and their steps end."""
    before: set[str] = set()

    def look_and_kill() -> None:
        before.update(_steps(held.slurm))
        kill_them()

    found = held.run(as_value(count), 4.0, screen=Watch(at_work(2), look_and_kill))
    assert dict(found.results) == {0: 40, 1: 40}
    assert len(before) >= 4, "of the keepers, of the lease, and one for each node"

    def have_ended() -> bool:
        left = before & _steps(held.slurm)
        return len(left) <= 1  # the keepers'

    wait_until(have_ended, "the steps of what was killed to end", every_s=LOOK_S)


def _steps(slurm: SlurmLab) -> set[str]:
    """Return the names of all steps that sruns have begun and that have not ended."""
    names = slurm.command("squeue", "-h", "--steps", "-o", "%i").split()
    return {name for name in names if name.rpartition(".")[2].isdecimal()}


# ---- what is away for a while


def test_the_log_in_node_is_cut_off_for_20_seconds(held):
    class Cable(Watch):
        def __init__(self) -> None:
            super().__init__(at_work(2), self.cut)
            self.since = math.inf
            self.was_broken = False

        def cut(self) -> None:
            held.slurm.login.cut()
            self.since = time.monotonic()

        def show(self, state: RunState) -> None:
            super().show(state)
            self.was_broken |= any(node.broken for node in state.nodes)
            if time.monotonic() > self.since + 20.0:
                held.slurm.login.heal()

    screen = Cable()
    found = held.run(as_value(count), 24.0, screen=screen, node_lost_after_s=60.0)
    assert screen.was_broken
    assert dict(found.results) == {0: 240, 1: 240}


def test_a_run_asks_slurm_nothing_and_a_controller_that_is_away_is_told(held):
    held.run(as_value(all_reduce))
    (job,) = held.slurm.jobs()
    screen = Watch(at_work(2), held.slurm.stop_controller)
    with replaced(held.slurm.login, "squeue", "touch /run/asked; exit 1"):
        found = held.run(as_value(count), 4.0, screen=screen)
    assert dict(found.results) == {0: 40, 1: 40}
    assert "asked" not in held.slurm.login.listdir("/run")
    error = failure(held.slurm, as_value(count), 0.1)
    assert isinstance(error, Unreachable)
    assert "dm1: Slurm's controller does not answer (" in error.message
    assert "scontrol ping" in error.hint
    held.slurm.start_controller()
    step = ["timeout", "5", "srun", f"--jobid={job}", *STEP_OPTIONS, "true"]
    wait_until(
        lambda: held.slurm.login.exec(step).returncode == 0,
        "Slurm to start steps again",
        every_s=LOOK_S,
    )
    assert held.run(as_value(all_reduce)).state.phase == "done"
    assert held.slurm.jobs() == (job,)


def test_an_interrupt_ends_the_ranks_and_keeps_the_nodes(held):
    screen = Watch(at_work(2), interrupt)
    with pytest.raises(Cancelled):
        held.run(as_value(count), 60.0, screen=screen)
    for host in held.slurm.nodes:
        left = [one for one in host.processes() if "RANK" in one.environ]
        assert left == []
    (job,) = held.slurm.jobs()
    found = held.run(as_value(all_reduce))
    assert found.state.phase == "done"
    assert held.slurm.jobs() == (job,)
