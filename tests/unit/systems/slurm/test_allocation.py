"""One allocation over a scripted log-in node: what it asks, when it gives up, and what it leaves."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import (
    AllocationEnded,
    ConnectionLost,
    PreflightError,
    Unreachable,
    UsageError,
)
from distmagic.request.access import Access
from distmagic.request.allocation import SlurmRequest
from distmagic.systems.slurm import allocation, lease_pipe, shell, srun_words
from distmagic.systems.slurm.allocation import ONE_CORE, Allocation, found, submitted
from distmagic.systems.slurm.shell import Shell
from distmagic.systems.slurm.submission import KeeperTerms
from distmagic.transports import local
from tests.builders.keepers import request_of
from tests.builders.logins import (
    CANCELLED,
    COMPLETING,
    ENDLESS,
    FOREIGN,
    PENDING,
    RUNNING,
    Login,
    Said,
    squeue,
)
from tests.lab.waiting import HANG_S, wait_until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "pauses", lambda: itertools.repeat(0.0))
    monkeypatch.setattr(allocation, "_AGAIN_S", 0.01)
    monkeypatch.setattr(allocation, "_LOOK_S", 0.0)


@pytest.fixture
def login() -> Login:
    return Login()


@pytest.fixture
def made(login: Login) -> Iterator[Allocation]:
    queue = Shell("login1", lambda _: login)
    one = submitted(SlurmRequest(login="login1", nodes=2), queue, replace(TERMS, lease_s=0.4), ASKER, "distmagic:me")  # fmt: skip
    yield one
    one.leave()


ASKER = NotebookAsker(can_ask=False)
TERMS = KeeperTerms(python="python3", lease_s=60.0)


def test_it_waits_and_says_why_and_then_has_the_nodes(login, made, golden):
    squeue(login, PENDING, PENDING, RUNNING)
    said: list[str] = []
    hosts = made.wait(ASKER, said.append)
    assert [host.name for host in hosts] == ["a1", "a2"]
    assert {host.allocation.name for host in hosts} == {"login1:slurm:17"}
    assert said[0] == said[1]
    golden(said[0])
    golden(said[2])
    assert login.programs() == ["sbatch", "squeue", "squeue", "squeue", "srun"]


def test_a_held_allocation_asks_slurm_nothing_and_renews_its_lease(login, made):
    squeue(login, RUNNING)
    made.wait(ASKER, print)
    before = len(login.asked)
    wait_until(lambda: len(login.leases[0].written) >= 3, "three renewals")
    assert made.wait(ASKER, print) == made.hosts
    assert login.asked[before:] == []


def test_a_lease_whose_pipe_breaks_is_opened_again(login, made):
    squeue(login, RUNNING)
    made.wait(ASKER, print)
    login.leases[0].stays = False
    wait_until(
        lambda: len(login.leases) == 2 and login.leases[1].written,
        "the second pipe to be used",
    )
    assert made.is_alive
    login.leases[1].stays = False
    assert made.check(ASKER)


def test_of_two_threads_that_open_the_pipe_again_at_once_one_pipe_stays(login, made):
    """The next cell, and the thread that renews the lease."""
    squeue(login, RUNNING)
    made.wait(ASKER, print)
    made._hold(ASKER, "a1", 0.0)
    assert [lease.stays for lease in login.leases] == [False, True]


def test_a_controller_that_is_away_says_nothing_of_the_job(login, made, golden):
    away = Said(
        err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        code=1,
    )
    login.answers["squeue"] = [away, Said(RUNNING)]
    said: list[str] = []
    made.wait(ASKER, said.append)
    golden(said[0])


def test_a_job_that_ends_before_it_is_ours(login, made, golden):
    squeue(login, PENDING, COMPLETING, CANCELLED)
    with golden.raises(AllocationEnded):
        made.wait(ASKER, print)
    assert not made.is_alive


def test_a_job_that_can_not_ever_start_is_cancelled_and_told(login, made, golden):
    squeue(login, ENDLESS)
    with golden.raises(UsageError):
        made.wait(ASKER, print)
    assert login.asked[-1] == ("scancel", "17")
    assert not made.is_alive


def test_somebody_elses_job_that_can_not_ever_start_is_left_as_it_is(login, golden):
    squeue(login, ENDLESS)
    queue = Shell("login1", lambda _: login)
    one = found(SlurmRequest(job="17"), queue, TERMS, ASKER)
    with golden.raises(UsageError):
        one.wait(ASKER, print)
    one.end()
    assert "scancel" not in login.programs()


def test_an_srun_that_hangs_is_given_up(login, made, monkeypatch, golden):
    class Hanging(Said):
        def __init__(self) -> None:
            super().__init__(stays=True)
            self.closed = threading.Event()

        def read(self, max_bytes: int = 65536) -> bytes:
            self.closed.wait(HANG_S)
            return b""

        def close(self) -> None:
            self.closed.set()

    monkeypatch.setattr(lease_pipe, "OPEN_S", 0.1)
    monkeypatch.setattr(allocation, "SETUP_S", 0.0)
    squeue(login, RUNNING)
    login.answers["srun"] = [Hanging()]
    with golden.raises(Unreachable):
        made.wait(ASKER, print)


def test_what_its_script_printed_is_told(login, made):
    squeue(login, RUNNING.replace("RUNNING", "FAILED"))
    login.answers[".distmagic-slurm-17.out"] = [Said("python3: not found\n")]
    with pytest.raises(AllocationEnded, match="python3: not found"):
        made.wait(ASKER, print)


def test_a_step_that_is_refused_for_a_while_is_tried_again(login, made):
    squeue(login, RUNNING)
    refused = "srun: error: Unable to create step for job 17: Memory required by task is not available\n"
    login.answers["srun"] = [Said(err=refused, code=1), Said(err=refused, code=1)]
    assert [host.name for host in made.wait(ASKER, print)] == ["a1", "a2"]


def test_a_job_that_completes_says_how_a_moment_later(login, made):
    squeue(login, RUNNING)
    (first, _) = made.wait(ASKER, print)
    made.transport(first, Access(), ASKER)
    squeue(login, COMPLETING, COMPLETING, CANCELLED)
    with pytest.raises(AllocationEnded, match="scancel"):
        made.transport(first, Access(), ASKER)
    asked = len(login.asked)
    with pytest.raises(AllocationEnded, match="scancel"):
        made.transport(first, Access(), ASKER)
    assert len(login.asked) == asked, "it is known by now"


def test_what_srun_only_says_has_ended_is_told_by_squeue_and_its_sruns_end(login, made):
    squeue(login, RUNNING)
    (_, second) = made.wait(ASKER, print)
    way = made.transport(second, Access(), ASKER)
    expired = "srun: error: Slurm job 17 has expired\n"
    login.answers["srun"] = [Said(err=expired, code=1)]
    squeue(login, CANCELLED)
    with pytest.raises(AllocationEnded, match="scancel"):
        way.start(("true",)).read()
    assert login.programs()[-2:] == ["squeue", "sh"]
    assert login.asked[-1][-2:] == ("17", "")


def ends_its_sruns(login: Login, end: Callable[[Allocation], None]) -> bool:
    """Whether the end of an allocation, to which a connection broke, ends its own sruns alone."""
    squeue(login, RUNNING)
    mine, other = (
        found(SlurmRequest(job="17"), Shell("login1", lambda _: login), TERMS, ASKER)
        for _ in range(2)
    )
    for one in (mine, other):
        (first, _) = one.wait(ASKER, print)
        one.transport(first, Access(), ASKER)
        one.transport(first, Access(), ASKER)  # the first one broke
    end(mine)
    *_, job, mark = login.asked[-1]
    marks = [request_of(argv)["mark"] for argv in login.asked if "distmagic-usher" in argv]  # fmt: skip
    other.leave()
    assert len(set(marks)) == 2
    return (job, mark) == ("17", marks[0])


def test_a_notebook_that_ends_leaves_the_sruns_of_another_one_in_its_job(login):
    assert ends_its_sruns(login, Allocation.end)
    assert ends_its_sruns(Login(), Allocation.leave)


def test_sruns_are_ended_by_their_mark_or_all_of_a_job():
    """The names of these processes are those that srun would have."""
    job = f"{os.getpid()}0017"
    names = [f'srun --jobid={job} -- distmagic-usher {{"mark": "{mark}"}}' for mark in ("a1", "b2")]  # fmt: skip
    mine, other = (subprocess.Popen((name, "600"), executable="/bin/sleep") for name in names)  # fmt: skip
    try:
        subprocess.run(srun_words.kill_sruns(job, "a1"), check=True)
        assert mine.wait(HANG_S) == -signal.SIGKILL
        assert other.poll() is None
        subprocess.run(srun_words.kill_sruns(job), check=True)
        assert other.wait(HANG_S) == -signal.SIGKILL
    finally:
        mine.kill()
        other.kill()


def test_the_doctor_hears_which_nodes_slurm_takes_out_of_use(login, made):
    squeue(login, RUNNING)
    made.wait(ASKER, print)
    login.answers["sinfo"] = [Said("a1|allocated|none\na2|draining|bad fan\n")]
    (finding,) = made.findings(ASKER)
    assert (finding.host, finding.check) == ("a2", "Slurm")
    assert "bad fan" in finding.evidence
    assert "ssh login1 scontrol show node a2" in finding.cure
    assert made.hosts[1].by_hand().startswith("ssh login1 srun --jobid=17 ")


def test_a_controller_that_is_away_is_no_finding(login, made):
    squeue(login, RUNNING)
    made.wait(ASKER, print)
    login.answers["sinfo"] = [Said(err="Unable to contact slurm controller", code=1)]
    assert made.findings(ASKER) == ()

    def hang(*_: object, **__: object) -> None:
        raise Unreachable("login1", "sinfo gave no answer within 5 s.", "")

    made._shell.run = hang
    assert made.findings(ASKER) == ()


def test_one_core_is_a_warning_of_the_first_node(login, made):
    squeue(login, RUNNING)
    first, second = made.wait(ASKER, print)
    assert made.transport(first, Access(), ASKER).warnings == (ONE_CORE,)
    assert made.transport(second, Access(), ASKER).warnings == ()


def test_the_end_of_one_that_is_held_tells_its_keeper_and_not_slurm(login, made):
    squeue(login, RUNNING)
    made.wait(ASKER, print)
    made.end()
    made.end()
    assert login.leases[0].written.endswith(b"e")
    assert "scancel" not in login.programs()
    assert not made.is_alive


def test_the_end_of_one_whose_pipe_is_broken_is_scancel_but_not_when_a_kernel_only_leaves(
    login,
):
    squeue(login, RUNNING)
    queue = Shell("login1", lambda _: login)
    wanted = SlurmRequest(nodes=2)
    one = submitted(wanted, queue, TERMS, ASKER, "distmagic:me")
    other = submitted(wanted, queue, TERMS, ASKER, "distmagic:me")
    one.wait(ASKER, print)
    other.wait(ASKER, print)
    for held in login.leases:
        held.stays = False
    other.leave()
    assert "scancel" not in login.programs()
    one.end()
    assert login.asked[-1] == ("scancel", "17")


def test_the_end_of_one_that_is_pending_is_scancel(login, made):
    made.leave()
    assert login.asked[-1] == ("scancel", "17")


def test_a_refusal_is_an_error_of_the_request(login):
    login.answers["sbatch"] = [
        Said(err="sbatch: error: invalid partition specified: x\n", code=1)
    ]
    queue = Shell("login1", lambda _: login)
    with pytest.raises(UsageError, match="invalid partition specified: x"):
        submitted(SlurmRequest(), queue, TERMS, ASKER, "")


def test_an_allocation_of_another_kernel(login, golden):
    squeue(login, RUNNING)
    queue = Shell("login1", lambda _: login)
    one = found(SlurmRequest(job="17"), queue, TERMS, ASKER)
    assert [host.name for host in one.wait(ASKER, print)] == ["a1", "a2"]
    one.leave()
    squeue(login, CANCELLED)
    with golden.raises(UsageError):
        found(SlurmRequest(job="17"), queue, TERMS, ASKER)


def test_a_job_that_was_not_made_for_us_gets_keepers_and_is_not_ours_to_end(login):
    squeue(login, FOREIGN)
    one = found(SlurmRequest(job="17"), Shell("login1", lambda _: login), TERMS, ASKER)
    assert len(one.wait(ASKER, print)) == 2
    trial = login.asked[login.programs().index("srun")]
    assert trial[:3] == ("srun", "--jobid=17", "--nodelist=a1")
    assert trial[-1] == "true"
    (started,) = [argv for argv in login.asked if "distmagic-keeper" in argv]
    assert "--nodelist=a1" in started
    assert request_of(started)["step"][-2:] == ["--nodes=1", "--ntasks=1"]
    one.end()
    assert "scancel" not in login.programs()
    pending = found(
        SlurmRequest(job="17"), Shell("login1", lambda _: login), TERMS, ASKER
    )
    pending.end()
    assert "scancel" not in login.programs()


def test_a_job_that_takes_no_step_for_keepers(login, golden):
    squeue(login, FOREIGN)
    said = "srun: error: Unable to create step for job 17: Insufficient GRES available in allocation\n"
    login.answers["srun"] = [Said(err=said, code=1)]
    queue = Shell("login1", lambda _: login)
    one = found(SlurmRequest(job="17"), queue, TERMS, ASKER)
    with golden.raises(PreflightError):
        one.wait(ASKER, print)
    assert not one.is_alive


def test_a_command_that_hangs_is_given_up_and_ended(tmp_path, monkeypatch, golden):
    monkeypatch.setattr(shell, "_LATER_S", 0.1)
    here = Shell("login1", lambda _: local.LocalTransport())
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\necho $$ >"$1"\nexec sleep 60\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    hangs = ("squeue", str(tmp_path / "pid"))
    with golden.raises(Unreachable):
        here.run(hangs, ASKER, timeout_s=2)
    place = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}")
    wait_until(lambda: not place.exists(), "the command to end")


def test_an_sbatch_without_an_answer_may_have_queued_the_job(
    tmp_path, monkeypatch, golden
):
    class Impatient(Shell):
        def run(self, argv, asker, stdin="", timeout_s=0, cure=""):
            return super().run(argv, asker, stdin, 0.5, cure)

    monkeypatch.setattr(shell, "_LATER_S", 0.1)
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    here = Impatient("login1", lambda _: local.LocalTransport())
    with golden.raises(Unreachable):
        submitted(SlurmRequest(), here, TERMS, ASKER, "")


def test_a_command_has_its_stdin_and_its_code_under_a_limit():
    here = Shell("login1", lambda _: local.LocalTransport())
    answer = here.run(("sh", "-c", "cat; exit 3"), ASKER, stdin="a script\n")
    assert (answer.code, answer.out) == (3, "a script\n")


def test_a_lost_connection_is_made_again():
    made: list[Login] = []

    class Broken(Login):
        def start(self, argv):
            raise ConnectionLost("lost")

    def connect(_):
        made.append(Broken() if not made else Login())
        return made[-1]

    there = Shell("login1", connect)
    assert there.run(("true",), ASKER).code == 0
    assert len(made) == 2
