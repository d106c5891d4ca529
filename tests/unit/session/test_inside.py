"""One process as a node of a job: what it runs, what it says, and what the others are told of the end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from distmagic import errors
from distmagic.connection.certificate import one_time_secret
from distmagic.errors import (
    Cancelled,
    DistmagicError,
    Unreachable,
    UsageError,
    WorkerFailed,
)
from distmagic.inside.job_node import RankTask
from distmagic.inside.proof import SharedSecret
from distmagic.outcome.run import Run
from distmagic.remote.wire import protocol
from distmagic.request.access import Access
from distmagic.request.spec import JobSpec
from distmagic.session.inside import Inside, Part, digest_of
from distmagic.state.model import NodeState, RunState, WorkerState
from tests.builders.dialling import places

SECRET = SharedSecret(one_time_secret())
ACCESS = Access(connect_timeout_s=1.0)
ENVIRON = {
    "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "0",
}


def no_link(_access: Access) -> Any:
    raise AssertionError("nothing is fetched here")


@pytest.fixture
def nodes() -> Iterator[tuple[Inside, Inside]]:
    """Two nodes of a job, which know the same secret."""
    found = tuple(
        Part(replace(place, lead="127.0.0.1"), SECRET, Inside("a kernel", no_link))
        for place in places()
    )
    yield found
    for one in found:
        one.close()


def a_run() -> Run:
    workers = {
        rank: WorkerState(
            rank=rank,
            local_rank=0,
            node_rank=rank,
            host=f"n{rank}",
            phase="done",
            ended=protocol.Ended(
                rank=rank, restart=0, outcome="returned", result_bytes=0
            ),
        )
        for rank in (0, 1)
    }
    hosts = tuple(NodeState(node_rank=rank, host=f"n{rank}") for rank in (0, 1))
    state = RunState(job="1122-a", nodes=hosts, workers=workers, world_size=2)
    return Run(state, {}, lambda _: no_link(ACCESS), shown=False)


def not_here(*_: object) -> Run:
    raise AssertionError("only node 0 runs it")


def both(nodes: tuple[Inside, Inside], launch: Any, *digests: str) -> tuple[Any, Any]:
    """Run one cell on both nodes; return two futures."""
    first, second = nodes
    own, other = digests or ("same", "same")
    with ThreadPoolExecutor(2) as pool:
        return (
            pool.submit(first.run, own, ACCESS, JobSpec(), launch),
            pool.submit(second.run, other, ACCESS, JobSpec(), not_here),
        )


def test_node_0_runs_it_on_all_hosts_and_the_other_gets_its_own_ranks(
    nodes, capsys, golden
):
    given = []

    def launch(hosts, access):
        given.append((hosts, access))
        return a_run()

    lead, other = both(nodes, launch)
    ((hosts, access),) = given
    assert [host.name for host in hosts] == ["localhost", "n1"]
    assert dict(access.pythons)["n1"], "the interpreter that node 1 runs"
    assert lead.result().job == other.result().job == "1122-a"
    assert dict(lead.result().results) == {0: None, 1: None}
    assert dict(other.result().results) == {1: None}
    said = capsys.readouterr().out
    golden(said)


def test_the_next_cell_meets_again(nodes):
    for _ in range(3):
        lead, other = both(nodes, lambda *_: a_run())
        assert lead.result().job == other.result().job


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerFailed("rank 1 (n1, local_rank 0) raised", "See it.", "ValueError: x"), WorkerFailed),
        (errors.Unreachable("n1", "no answer.", "Look."), DistmagicError),
        (KeyError("x"), DistmagicError),
        (KeyboardInterrupt(), Cancelled),
    ],
    ids=["a rank", "a host", "the notebook", "an interrupt"],
)  # fmt: skip
def test_an_error_is_that_of_all_nodes(nodes, error, kind, golden):
    def launch(*_):
        raise error

    lead, other = both(nodes, launch)
    expected = Cancelled if isinstance(error, KeyboardInterrupt) else type(error)
    assert isinstance(lead.exception(), expected)
    assert type(other.exception()) is kind
    golden(other.exception())


def test_a_run_that_fails_leaves_each_node_its_own_ranks(nodes):
    def launch(*_):
        error = WorkerFailed("rank 1 raised")
        error.run = a_run()
        raise error

    _, other = both(nodes, launch)
    assert dict(other.exception().run.results) == {1: None}


def test_nodes_with_different_cells_are_told_both(nodes, golden):
    lead, other = both(nodes, not_here, "one", "another")
    assert isinstance(lead.exception(), UsageError)
    assert str(lead.exception()) == str(other.exception())
    golden(lead.exception())


def test_a_node_whose_own_statements_fail_leaves(nodes, golden):
    first, second = nodes

    def fails():
        raise NameError("x")

    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(second.run, "same", ACCESS, JobSpec(), not_here, before=fails)
        with golden.raises(Unreachable):  # before the first cell, or after it
            first.run("same", ACCESS, JobSpec(), lambda *_: a_run())
            first.run("next", ACCESS, JobSpec(), not_here)
        assert isinstance(ran.exception(), NameError)


@pytest.mark.parametrize("node_rank", [0, 1])
def test_nodes_that_can_not_prove_themselves_do_not_train_alone(node_rank, golden):
    place = replace(places()[0], node_rank=node_rank)
    with pytest.raises(UsageError) as caught:
        Part(place, None, Inside("", no_link)).run("", ACCESS, JobSpec(), not_here)
    assert "--on none" in caught.value.hint
    golden(caught.value)


def test_under_slurm_all_that_was_looked_for_is_named(golden):
    place = replace(places()[0], key="slurm 7.0")
    with golden.raises(UsageError):
        Part(place, None, Inside("", no_link)).run("", ACCESS, JobSpec(), not_here)


def test_what_can_not_run_inside(golden):
    place, _ = places()
    task = RankTask(
        rank=1, world_size=4, local_rank=1, local_world_size=2, said_by="RANK, LOCAL_RANK"
    )  # fmt: skip
    of_a_rank = Part(replace(place, task=task), SECRET, Inside("", no_link))
    with golden.raises(UsageError):
        of_a_rank.run("", ACCESS, JobSpec(), not_here)
    with pytest.raises(UsageError) as caught:
        Part(place, SECRET, Inside("", no_link)).run(
            "", ACCESS, JobSpec(detach=True), not_here
        )
    assert "--detach does not work in a job" in str(caught.value)


def test_the_part_is_kept_for_the_next_cell():
    inside = Inside("k", no_link)
    assert inside.part({}) is None
    part = inside.part(ENVIRON)
    assert part is inside.part(ENVIRON)
    assert part is not inside.part(ENVIRON | {"SKYPILOT_NODE_RANK": "1"})


def test_digests_tell_texts_apart():
    assert digest_of("a", "b") == digest_of("a", "b")
    assert len({digest_of("ab"), digest_of("a", "b"), digest_of("", "ab")}) == 3
    digest_of("\udcff")
