"""The allocations of a kernel over a scripted log-in node: which is used again, and what ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import (
    AllocationEnded,
    NodeLost,
    Unreachable,
    UsageError,
    WorkerFailed,
)
from distmagic.remote.system import memory
from distmagic.request.access import Access
from distmagic.request.allocation import SkyRequest, SlurmRequest
from distmagic.request.hosts import Host
from distmagic.session.allocations import Allocations
from distmagic.systems.slurm.allocation import MORE_MEMORY
from distmagic.systems.slurm.srun_words import source
from tests.builders.logins import RUNNING, Login, Said, squeue
from tests.builders.sky import Sky, entries

ASKER = NotebookAsker(can_ask=False)
WANTED = SlurmRequest(login="login1", nodes=2)


@pytest.fixture
def login() -> Login:
    made = Login()
    made.answers["sbatch"] = [Said("17\n"), Said("18\n")]
    squeue(made, RUNNING + RUNNING.replace("17", "18"))
    return made


@pytest.fixture
def allocations(login: Login) -> Iterator[Allocations]:
    reached: list[Host] = []

    def connect(host, access, asker):
        reached.append(host)
        return login

    made = Allocations(connect)
    made.reached = reached
    yield made
    made.leave()


def get(allocations, request=WANTED, access=None):
    one = allocations.get(request, access or Access(), ASKER, "me", is_elastic=False)
    one.wait(ASKER, print)
    return one


def test_the_same_request_gets_the_same_nodes_and_another_one_gets_others(allocations):
    first = get(allocations)
    assert get(allocations) is first
    other = get(
        allocations, SlurmRequest(login="login1", nodes=2, options=(("mem", "1G"),))
    )
    assert (first.job, other.job) == ("17", "18")
    assert [host.name for host in allocations.hosts] == ["a1", "a2", "a1", "a2"]
    assert len(set(allocations.hosts)) == 4, (
        "the same names in two allocations are four places"
    )
    assert [host.name for host in allocations.reached] == ["login1"], (
        "one connection for both"
    )


def test_an_allocation_that_has_ended_is_not_used_again(allocations, login, golden):
    first = get(allocations)
    login.leases[0].stays = False
    login.answers["srun"] = [
        Said(err="srun: error: Slurm job 17 has expired\n", code=1)
    ]
    squeue(login, RUNNING.replace("RUNNING", "TIMEOUT"), RUNNING.replace("17", "18"))
    second = get(allocations)
    assert (first.job, second.job) == ("17", "18")
    golden(first.error)


def test_the_way_to_a_node_is_that_of_its_own_allocation(allocations):
    first = get(allocations)
    assert allocations.transport(first.hosts[1], Access(), ASKER).node.job == "17"
    with pytest.raises(AllocationEnded, match="99"):
        allocations.transport(
            Host(name="a1", allocation=source("login1", "99")), Access(), ASKER
        )


def test_all_that_this_user_has_is_listed_and_nothing_else(allocations, login):
    rows = [
        RUNNING,
        RUNNING.replace("17", "20").replace("distmagic:me", "somebody's own"),
        RUNNING.replace("17", "21").replace("RUNNING", "COMPLETING"),
        "22|PENDING|Priority||N/A|1:00|1|distmagic:you\n",
    ]
    squeue(login, "".join(rows))
    rows = allocations.pool("slurm").listed(WANTED, Access(), ASKER)
    assert [row[0] for row in rows] == ["job", "17", "21", "22"]


def test_the_end_is_told_to_every_lead(allocations, login):
    get(allocations)
    allocations.end()
    assert login.leases[0].written.endswith(b"e")
    assert allocations.hosts == ()


def test_a_kernel_that_leaves_gives_up_its_leases(allocations, login):
    get(allocations)
    allocations.leave()
    assert login.leases[0].written.endswith(b"b")


def test_the_error_of_a_run_says_what_to_do_about_its_allocation(allocations, golden):
    one = get(allocations)
    lost = NodeLost("A host was lost.", "What still runs there ends by itself.")
    allocations.advise(one.hosts, lost)
    golden(lost)
    one.error = AllocationEnded("It reached its time limit.", "Ask for more: --time.")
    allocations.advise(one.hosts, lost)
    assert lost.hint == "Ask for more: --time."


def test_a_rank_without_memory_is_told_to_ask_slurm_for_more(allocations):
    one = get(allocations)
    killed = WorkerFailed(
        f"rank 1 was killed: {memory.REACHED} (...).", "Its output.", ""
    )
    allocations.advise((Host(name="elsewhere"),), killed)
    assert killed.hint == "Its output."
    allocations.advise(one.hosts, killed)
    assert killed.hint == f"{MORE_MEMORY}\nIts output."


def test_a_cluster_that_did_not_answer_is_asked_for_again(
    allocations, tmp_path, monkeypatch
):
    skypilot = Sky(tmp_path, monkeypatch)
    # Nothing listens on the discard port.
    skypilot.has("mine", entries("mine", ("127.0.0.1",), port=9))
    wanted = SkyRequest(name="mine")
    first = get(allocations, wanted)
    assert get(allocations, wanted) is first
    assert allocations.pool("skypilot").names == ("mine",)
    with pytest.raises(Unreachable):
        allocations.transport(first.hosts[0], Access(), ASKER)
    assert get(allocations, wanted) is not first
    assert skypilot.asked == ["status --output json"] * 2
    assert allocations.pool("skypilot").take_down("mine", ASKER) == ""
    assert skypilot.asked[-1] == "down --yes mine"
    assert allocations.pool("skypilot").names == ()
    earlier = replace(first.source, name="sky:mine:0")
    with pytest.raises(AllocationEnded, match="mine"):
        allocations.transport(Host(name="mine", allocation=earlier), Access(), ASKER)


@pytest.mark.parametrize("name", ["--all", "-a", "dm-*", ""])
def test_what_is_no_name_of_a_cluster_takes_none_down(
    allocations, tmp_path, monkeypatch, name, golden
):
    skypilot = Sky(tmp_path, monkeypatch)
    with golden.raises(UsageError):
        allocations.pool("skypilot").take_down(name, ASKER)
    assert skypilot.asked == []
