"""One allocation over a scripted log-in node: what it asks, when it gives up, and what it leaves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from distmagic.clusters import allocation, slurm
from distmagic.clusters.allocation import ONE_CORE, Allocation, found, pauses, submitted
from distmagic.clusters.shell import Shell
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import AllocationEnded, ConnectionLost, SpecError, Unreachable
from distmagic.request.allocation import AllocationRequest
from tests.builders.keepers import request_of
from tests.builders.logins import (
    CANCELLED,
    COMPLETING,
    FOREIGN,
    PENDING,
    RUNNING,
    Login,
    Said,
    squeue,
)
from tests.lab.waiting import wait_until


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
    shell = Shell("login1", lambda _: login)
    one = submitted(
        AllocationRequest(login="login1", nodes=2), shell, ASKER, comment="distmagic:me", python="python3", lease_s=0.4,
        is_elastic=False,
    )  # fmt: skip
    yield one
    one.leave()


ASKER = NotebookAsker(can_ask=False)


def test_it_waits_and_says_why_and_then_has_the_nodes(login, made):
    squeue(login, PENDING, PENDING, RUNNING)
    said: list[str] = []
    hosts = made.wait(ASKER, said.append)
    assert [host.name for host in hosts] == ["a1", "a2"]
    assert {host.allocation for host in hosts} == {"login1:slurm:17"}
    assert (
        said[0]
        == said[1]
        == "Slurm job 17 is pending: the nodes it needs are busy (Resources)."
    )
    assert said[2] == "Slurm job 17 runs on a1, a2; its nodes are being set up."
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


def test_a_controller_that_is_away_says_nothing_of_the_job(login, made):
    away = Said(
        err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        code=1,
    )
    login.answers["squeue"] = [away, Said(RUNNING)]
    said: list[str] = []
    made.wait(ASKER, said.append)
    assert said[0].startswith(
        "How Slurm job 17 stands is not known: login1: Slurm's controller does not answer"
    )


def test_a_job_that_ends_before_it_is_ours(login, made):
    squeue(login, PENDING, CANCELLED)
    with pytest.raises(AllocationEnded, match="was cancelled with scancel"):
        made.wait(ASKER, print)
    assert not made.is_alive


def test_what_its_script_printed_is_told(login, made):
    squeue(login, RUNNING.replace("RUNNING", "FAILED"))
    login.answers[".distmagic-slurm-17.out"] = [Said("python3: not found\n")]
    with pytest.raises(AllocationEnded, match="It printed: python3: not found"):
        made.wait(ASKER, print)


def test_a_step_that_is_refused_for_a_while_is_tried_again(login, made):
    squeue(login, RUNNING)
    refused = "srun: error: Unable to create step for job 17: Memory required by task is not available\n"
    login.answers["srun"] = [Said(err=refused, code=1), Said(err=refused, code=1)]
    assert [host.name for host in made.wait(ASKER, print)] == ["a1", "a2"]


def test_a_job_that_completes_says_how_a_moment_later(login, made):
    squeue(login, RUNNING)
    (first, _) = made.wait(ASKER, print)
    made.transport(first, ASKER)
    squeue(login, COMPLETING, COMPLETING, CANCELLED)
    with pytest.raises(AllocationEnded, match="was cancelled with scancel"):
        made.transport(first, ASKER)
    asked = len(login.asked)
    with pytest.raises(AllocationEnded, match="was cancelled with scancel"):
        made.transport(first, ASKER)
    assert len(login.asked) == asked, "it is known by now"


def test_one_core_is_a_warning_of_the_first_node(login, made):
    squeue(login, RUNNING)
    first, second = made.wait(ASKER, print)
    assert made.transport(first, ASKER).warnings == (ONE_CORE,)
    assert made.transport(second, ASKER).warnings == ()


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
    shell, wanted = Shell("login1", lambda _: login), AllocationRequest(nodes=2)
    one = submitted(
        wanted,
        shell,
        ASKER,
        comment="distmagic:me",
        python="p",
        lease_s=60,
        is_elastic=False,
    )
    other = submitted(
        wanted,
        shell,
        ASKER,
        comment="distmagic:me",
        python="p",
        lease_s=60,
        is_elastic=False,
    )
    one.wait(ASKER, print)
    other.wait(ASKER, print)
    for lease in login.leases:
        lease.stays = False
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
    shell = Shell("login1", lambda _: login)
    with pytest.raises(SpecError, match="no such partition"):
        submitted(
            AllocationRequest(),
            shell,
            ASKER,
            comment="",
            python="p",
            lease_s=60,
            is_elastic=False,
        )


def test_an_allocation_of_another_kernel(login):
    squeue(login, RUNNING)
    shell = Shell("login1", lambda _: login)
    one = found(AllocationRequest(job="17"), shell, ASKER, python="p", lease_s=60)
    assert [host.name for host in one.wait(ASKER, print)] == ["a1", "a2"]
    one.leave()
    squeue(login, CANCELLED)
    with pytest.raises(SpecError, match="Slurm has no job 17 that runs"):
        found(AllocationRequest(job="17"), shell, ASKER, python="p", lease_s=60)


def test_a_job_that_was_not_made_for_us_gets_keepers_and_is_not_ours_to_end(login):
    squeue(login, FOREIGN)
    one = found(
        AllocationRequest(job="17"),
        Shell("login1", lambda _: login),
        ASKER,
        python="p",
        lease_s=60,
    )
    assert len(one.wait(ASKER, print)) == 2
    (started,) = [argv for argv in login.asked if "distmagic-keeper" in argv]
    assert "--nodelist=a1" in started
    assert request_of(started)["step"][-2:] == ["--nodes=1", "--ntasks=1"]
    one.end()
    assert "scancel" not in login.programs()
    pending = found(
        AllocationRequest(job="17"),
        Shell("login1", lambda _: login),
        ASKER,
        python="p",
        lease_s=60,
    )
    pending.end()
    assert "scancel" not in login.programs()


def test_looks_become_rare():
    assert (
        list(itertools.islice(pauses(), 26))
        == [1.0] * 10 + [5.0] * 6 + [15.0] * 8 + [30.0] * 2
    )


def test_a_command_that_hangs_is_given_up():
    class Hanging(Login):
        def start(self, argv):
            from distmagic.transports import local

            return local.connect().start(("sleep", "60"))

    shell = Shell("login1", lambda _: Hanging())
    with pytest.raises(
        Unreachable, match=r"login1: squeue gave no answer within 0\.3 s"
    ):
        shell.run(slurm.srun_words.clean(("squeue",)), ASKER, timeout_s=0.3)


def test_a_lost_connection_is_made_again():
    made: list[Login] = []

    class Broken(Login):
        def start(self, argv):
            raise ConnectionLost("lost")

    def connect(_):
        made.append(Broken() if not made else Login())
        return made[-1]

    shell = Shell("login1", connect)
    assert shell.run(("true",), ASKER).code == 0
    assert len(made) == 2
