"""Real Slurm: a cell's hosts are the nodes of an allocation, reached through a log-in node."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import distmagic
from distmagic import api
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import AllocationEnded, DistmagicError, PreflightError, SpecError
from distmagic.planning.jobs import choose
from distmagic.request.allocation import AllocationRequest
from distmagic.request.spec import JobSpec
from distmagic.session.session import Session
from tests import REPOSITORY
from tests.e2e import runner
from tests.e2e.programs import count
from tests.e2e.runner import Watch, all_reduce, as_value, at_work
from tests.lab import wait_until
from tests.lab.slurm import USER, SlurmLab

pytestmark = [pytest.mark.needs("lab", "slurm"), pytest.mark.timeout(180)]

TWO = AllocationRequest(login="dm1", nodes=2, options=(("cpus-per-task", "4"),))


@pytest.fixture(autouse=True)
def kernel(slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A kernel's session of its own for each test; afterwards nothing is left, in Slurm or on any host."""
    made = Session()
    monkeypatch.setattr(api, "session", lambda: made)
    yield made
    made.down()
    slurm.assert_clean()


def run(slurm: SlurmLab, fn: Any, *args: Any, **options: Any) -> Any:
    way = options.pop("access", None) or runner.access(slurm.lab)
    request = options.pop("allocation", TWO)
    screen = options.pop("screen", None) or Watch()
    return distmagic.run(
        fn, *args, allocation=request, access=way, screen=screen, **options
    )


def failure(slurm: SlurmLab, fn: Any, *args: Any, **options: Any) -> DistmagicError:
    try:
        run(slurm, fn, *args, **options)
    except DistmagicError as error:
        return error
    raise AssertionError("the run did not fail")


def test_ranks_on_two_nodes(slurm: SlurmLab) -> None:
    found = run(slurm, as_value(all_reduce), nproc_per_node=2)
    assert [found.results[rank]["host"] for rank in range(4)] == [
        "dm2",
        "dm2",
        "dm3",
        "dm3",
    ]
    assert {float(found.results[rank]["total"]) for rank in range(4)} == {6.0}
    assert [node.host for node in found.state.nodes] == list(slurm.names)


def test_the_next_cell_starts_in_the_same_allocation_and_warm(slurm: SlurmLab) -> None:
    way = runner.access(slurm.lab, warm_idle_s=60.0)
    run(slurm, as_value(all_reduce), access=way)
    (job,) = slurm.jobs()
    began = time.monotonic()
    run(slurm, as_value(all_reduce), access=way)
    took_s = time.monotonic() - began
    assert slurm.jobs() == (job,)
    assert took_s < 5.0, "it was not warm"


def test_an_ordinary_user(slurm: SlurmLab) -> None:
    request = dataclasses.replace(TWO, login=f"{USER}@dm1")
    found = run(slurm, as_value(all_reduce), allocation=request)
    assert {float(found.results[rank]["total"]) for rank in range(2)} == {1.0}


def test_a_detached_job_holds_its_nodes_when_its_kernel_is_gone(
    slurm: SlurmLab, kernel: Session
) -> None:
    left = run(slurm, as_value(count), 12.0, detach=True)
    (job,) = slurm.jobs()
    kernel.close()
    other = Session()
    try:
        way = runner.access(slurm.lab)
        asker = NotebookAsker(can_ask=False)
        (listed,) = other.allocations("dm1", way, asker)
        assert listed.job == job
        request = AllocationRequest(login="dm1", job=job)
        hosts = other.allocation(request, way, asker, JobSpec()).wait(asker, print)
        there = choose(
            other.jobs(other.reach(hosts, way, asker)), left.job
        )  # others of earlier tests have ended
        found = other.attach(other.reach(hosts, way, asker), there, Watch())
        assert dict(found.results) == {0: 120, 1: 120}
    finally:
        other.down()


# ---- pending, refused


def fill(slurm: SlurmLab) -> str:
    """Give all nodes to somebody else; return the number of his job."""
    job = slurm.command(
        "sbatch",
        "--parsable",
        "-N2",
        "--exclusive",
        "-o",
        "/dev/null",
        "--wrap",
        "sleep 600",
    ).strip()
    wait_until(
        lambda: (
            slurm.command("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING"
        ),
        "the nodes to be busy",
    )
    return job


class Impatient(Watch):
    """Interrupts as soon as a notice has these words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words
        self.notice = ""

    def show(self, state: Any) -> None:
        """Look for the words."""
        super().show(state)
        for notice in state.notices:
            if self._words in notice:
                self.notice = notice
                raise KeyboardInterrupt


def test_a_pending_allocation_says_why_and_an_interrupt_cancels_it(
    slurm: SlurmLab,
) -> None:
    other = fill(slurm)
    screen = Impatient("(Resources)")
    with pytest.raises(KeyboardInterrupt):
        run(slurm, as_value(all_reduce), screen=screen)
    assert "is pending: the nodes it needs are busy (Resources)." in screen.notice
    wait_until(lambda: slurm.jobs() == (other,), "only the other job")
    slurm.command("scancel", other)


def test_a_pending_allocation_begins_when_its_nodes_are_free(slurm: SlurmLab) -> None:
    other = fill(slurm)
    seen: list[str] = []

    class Freeing(Watch):
        def show(self, state: Any) -> None:
            super().show(state)
            seen.extend(state.notices)
            if any("(Resources)" in notice for notice in state.notices):
                slurm.command("scancel", other)

    found = run(slurm, as_value(all_reduce), screen=Freeing())
    assert found.state.phase == "done"
    assert any("its nodes are being set up" in notice for notice in seen)


@pytest.mark.parametrize(
    ("options", "nodes", "message"),
    [
        ((("partition", "nope"),), 1, "Slurm has no such partition, or not for you"),
        ((("constraint", "nope"),), 1, "no node has the feature of --constraint"),
        (
            (("gpus-per-node", "9"),),
            1,
            "no nodes of this partition are as the job asks for",
        ),
        ((("mem", "900G"),), 1, "as much memory as --mem asks for"),
        ((("frobnicate", "1"),), 1, "this sbatch doesn't know an option"),
    ],
)
def test_what_slurm_refuses_is_told_in_words(
    slurm: SlurmLab, options: Any, nodes: int, message: str
) -> None:
    request = AllocationRequest(login="dm1", nodes=nodes, options=options)
    error = failure(slurm, as_value(all_reduce), allocation=request)
    assert isinstance(error, SpecError)
    assert message in str(error)
    assert "sbatch" in str(error)


def test_a_batch_script_that_fails_is_told(slurm: SlurmLab) -> None:
    way = runner.access(slurm.lab, pythons=(("", "/nowhere/python3"),))
    error = failure(slurm, as_value(all_reduce), access=way)
    assert isinstance(error, AllocationEnded | PreflightError)
    assert "--python" in error.hint
    for (
        host
    ) in slurm.nodes:  # homes are not shared here, so nobody could read what it printed
        host.exec(["sh", "-c", "rm -f .distmagic-slurm-*"])


HOSTILE = "two  words 'single' \"double\" $HOME `id` $(id) é ü \\ ! * ; | & #"


def test_hostile_values_arrive_as_they_are(slurm: SlurmLab) -> None:
    setup = f"export SAID={shlex.quote(HOSTILE)}\nexport TWO='a\nb'"
    request = AllocationRequest(
        login="dm1", nodes=2, options=(("account", HOSTILE),), setup=setup
    )

    def said() -> tuple[str, str]:
        import os

        return os.environ["SAID"], os.environ["TWO"]

    class Accounts(Watch):
        def finish(self, state: Any) -> None:
            super().finish(state)
            self.account = slurm.command("squeue", "-h", "-o", "%a").strip()

        def requests(self) -> tuple[str, ...]:
            return ()

    screen = Accounts()
    found = run(slurm, as_value(said), allocation=request, screen=screen)
    assert dict(found.results) == {0: (HOSTILE, "a\nb"), 1: (HOSTILE, "a\nb")}
    assert screen.account == HOSTILE.lower()  # as Slurm keeps accounts


# ---- what ends, and what goes on


def test_ranks_see_nothing_of_the_keepers_task_and_their_jobs_number(
    slurm: SlurmLab,
) -> None:
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

    request = dataclasses.replace(TWO, options=(("gpus-per-node", "2"),))
    found = run(slurm, as_value(variables), allocation=request, nproc_per_node=1)
    for rank in range(2):
        odd, job, gpus = found.results[rank]
        assert odd == []
        assert job.isdecimal()
        assert gpus == "0,1"


def test_somebody_else_cancels_the_job_in_the_middle_of_a_run(slurm: SlurmLab) -> None:
    screen = Watch(at_work(2), lambda: slurm.command("scancel", *slurm.jobs()))
    error = failure(slurm, as_value(count), 60.0, screen=screen)
    assert "was cancelled with scancel, not by this notebook" in str(error)


def pids(slurm: SlurmLab, *, of: str) -> list[str]:
    return [
        str(p.pid)
        for p in slurm.login.processes()
        if p.name == of and "distmagic-usher" in p.cmdline
    ]


def test_sruns_that_are_killed_end_no_run(slurm: SlurmLab) -> None:
    screen = Watch(
        at_work(2), lambda: slurm.login.exec(["kill", "-9", *pids(slurm, of="srun")])
    )
    found = run(slurm, as_value(count), 8.0, screen=screen)
    assert dict(found.results) == {0: 80, 1: 80}


def test_ushers_that_are_killed_end_no_run(slurm: SlurmLab) -> None:
    def kill() -> None:
        for host in slurm.nodes:
            ushers = [
                str(p.pid) for p in host.processes() if "distmagic-usher" in p.cmdline
            ]
            host.exec(["kill", "-9", *ushers])

    found = run(slurm, as_value(count), 8.0, screen=Watch(at_work(2), kill))
    assert dict(found.results) == {0: 80, 1: 80}


def test_the_log_in_node_is_cut_off_for_a_while(slurm: SlurmLab) -> None:
    class Cable(Watch):
        def show(self, state: Any) -> None:
            super().show(state)
            if any(node.broken for node in state.nodes):
                slurm.login.heal()

    screen = Cable(at_work(2), slurm.login.cut)
    found = run(slurm, as_value(count), 20.0, screen=screen, node_lost_after_s=60.0)
    assert dict(found.results) == {0: 200, 1: 200}


def test_the_controller_is_away_for_a_while(slurm: SlurmLab) -> None:
    found = run(
        slurm, as_value(count), 8.0, screen=Watch(at_work(2), slurm.stop_controller)
    )
    assert dict(found.results) == {0: 80, 1: 80}
    slurm.start_controller()


KERNEL = """
import dataclasses, sys, time
import distmagic
from distmagic.planning.jobs import choose
from distmagic.request.allocation import AllocationRequest
from distmagic.request.spec import Access
from tests.e2e.runner import Watch, as_value
from tests.e2e.programs import count

class Screen(Watch):
    def show(self, state):
        for notice in state.notices:
            print(notice, flush=True)

way = Access(ssh_config=sys.argv[1], warm_idle_s=0.0, lease_s=4.0)
request = AllocationRequest(login="dm1", nodes=2)
distmagic.run(as_value(count), 0.5, allocation=request, access=way, screen=Screen())
print("over", flush=True)
time.sleep(600)
"""


def kernel_of_its_own(slurm: SlurmLab) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", KERNEL, str(slurm.lab.ssh_config)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip


def say_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"it never said {words!r}")


def test_a_kernel_that_is_killed_leaves_no_allocation(slurm: SlurmLab) -> None:
    with kernel_of_its_own(slurm) as process:
        say_until(process, "over")
        (job,) = slurm.jobs()
        process.kill()
    wait_until(lambda: not slurm.jobs(), "the allocation to end with its lease", 30)
    assert "JobState=COMPLETED" in slurm.command("scontrol", "show", "job", job)


def test_a_kernel_that_exits_gives_its_nodes_back_at_once(slurm: SlurmLab) -> None:
    with kernel_of_its_own(slurm) as process:
        say_until(process, "over")
        process.send_signal(signal.SIGINT)
    wait_until(lambda: not slurm.jobs(), "the allocation to end", 3)


def test_a_script_in_a_terminal_gets_nodes_and_gives_them_back(
    slurm: SlurmLab, tmp_path: Path
) -> None:
    (tmp_path / "data.txt").write_text("some data")
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint('seen', os.environ['RANK'], sys.argv, os.getcwd(), open('data.txt').read())\n"
    )
    flags = [
        "--on",
        "slurm:dm1",
        "--nodes",
        "2",
        "--slurm",
        "cpus-per-task=4",
        "--name",
        "script",
    ]
    flags += ["--cold", "--ssh-config", str(slurm.lab.ssh_config)]
    done = subprocess.run(
        [sys.executable, "-m", "distmagic.cli", "run", *flags, "train.py", "50"], capture_output=True, text=True,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, timeout=150, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done
    for rank, name in enumerate(slurm.names):
        line = rf"\[rank {rank} {name}\] seen {rank} \['train.py', '50'\] \S+/\.distmagic/work/script some data\n"
        assert re.search(line, done.stdout), done.stdout
    wait_until(lambda: not slurm.jobs(), "the allocation to end", 10)


def test_an_unused_allocation_ends(slurm: SlurmLab, kernel: Session) -> None:
    request = dataclasses.replace(TWO, idle_s=2.0)
    run(slurm, as_value(all_reduce), allocation=request)
    wait_until(lambda: not slurm.jobs(), "the allocation to end", 20)
    found = run(slurm, as_value(all_reduce), allocation=request)
    assert found.state.phase == "done", "the next cell asks for new nodes"


def test_two_kernels_share_the_nodes(slurm: SlurmLab) -> None:
    one = AllocationRequest(login="dm1", nodes=2, options=(("cpus-per-task", "2"),))
    other = Session()
    try:
        way, asker = runner.access(slurm.lab), NotebookAsker(can_ask=False)
        hosts = other.allocation(one, way, asker, JobSpec()).wait(asker, print)
        found = run(slurm, as_value(all_reduce), allocation=one)
        assert {node.host for node in found.state.nodes} == {
            host.name for host in hosts
        }
        assert len(slurm.jobs()) == 2
    finally:
        other.down()


def test_a_job_that_was_not_submitted_for_us(slurm: SlurmLab, kernel: Session) -> None:
    job = slurm.command(
        "sbatch",
        "--parsable",
        "-N2",
        "--gpus-per-node=1",
        "-c4",
        "-o",
        "/dev/null",
        "--wrap",
        "sleep 600",
    ).strip()
    request = AllocationRequest(login="dm1", job=job)
    wait_until(
        lambda: (
            slurm.command("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING"
        ),
        "the job to run",
    )

    def gpus() -> str:
        import os

        return os.environ["CUDA_VISIBLE_DEVICES"]

    found = run(slurm, as_value(gpus), allocation=request, nproc_per_node=1)
    assert dict(found.results) == {0: "0", 1: "0"}
    kernel.down()
    assert slurm.jobs() == (job,), "it is not ours to end"
    slurm.lab.assert_clean(20.0)
    slurm.command("scancel", job)


def test_on_the_log_in_node_itself(slurm: SlurmLab) -> None:
    program = KERNEL.replace('login="dm1", ', "").replace("time.sleep(600)", "")
    done = slurm.login.exec(
        ["env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-c", program, "/dev/null"],
        timeout_s=100,
    )
    assert "over" in done.stdout, done.stderr
    wait_until(lambda: not slurm.jobs(), "the allocation to end", 10)
