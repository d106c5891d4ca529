"""A run from its beginning to its end: the script `launch`, over hosts that answer by script."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from distmagic.connection.first_links import FirstLinks
from distmagic.connection.warm_hosts import WarmHosts
from distmagic.errors import (
    ConnectionLost,
    HostErrors,
    PayloadError,
    PreflightError,
    Unreachable,
    UsageError,
)
from distmagic.payload import blobs
from distmagic.payload.blobs import keep
from distmagic.payload.pack import OtherPython, Payload
from distmagic.remote.wire import protocol as p
from distmagic.request.access import Access
from distmagic.request.spec import JobSpec
from distmagic.runner import launch
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.interrupts import Interrupts
from distmagic.runner.run_loop import RunLoop
from distmagic.state import decide
from distmagic.state.events import Lost
from distmagic.state.model import RunState
from tests.builders.events import at, begun
from tests.builders.hosts import (
    HANG_UP,
    RESULT,
    FakeConnection,
    FakeHost,
    down,
    reach,
    runs_on,
    runs_to_its_end,
)
from tests.builders.jobs import (
    assert_left,
    has_ranks,
    killed_agent,
    launched,
    listing,
    payload_in,
    two,
)
from tests.builders.plans import WORK, reached
from tests.builders.runs import FakeScreen
from tests.lab import wait_until
from tests.lab.waiting import HANG_S

C = reached("gpu-c", "10.0.0.3", "eth1", slots="gpu", gpus=4)
GONE = ConnectionLost("gpu-b: the connection ended.", "")


def swept(link: Callable[..., Any], clock: Callable[[], float]) -> RunLoop:
    """Sweep two hosts that are lost, to which `link` opens links; return the loop after it."""
    state = begun(at(Lost(why="cut off"), 0), at(Lost(why="cut off"), 1))
    loop = RunLoop(
        state,
        EventQueue(clock),
        FakeScreen(),
        lambda longest_s: None,
        Interrupts(),
        clock,
        lambda: "id",
    )
    rows = [SimpleNamespace(host_index=index, link=None) for index in range(2)]
    opener: Any = SimpleNamespace(link=link)
    table: Any = SimpleNamespace(rows=rows)
    launch._sweep(loop, opener, table)
    assert list(loop.state.lost) == [0, 1]
    return loop


def test_a_bug_in_the_sweep_of_a_lost_host_takes_no_run_away():
    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("a bug")

    assert swept(broken, lambda: 1.0).state.is_over


def test_nobody_waits_long_for_the_sweep_of_a_host_that_accepts_and_answers_nothing():
    goes_on = threading.Event()
    times = itertools.count()

    def silent(*_: object, **__: object) -> Any:
        goes_on.wait(HANG_S)
        raise ConnectionLost("gpu-a: the connection ended.")

    swept(silent, lambda: float(next(times)))
    assert not goes_on.is_set()
    assert next(times) < launch.SWEEP_S + 10
    goes_on.set()


# ---- launch


def test_a_run_is_followed_to_its_end_and_small_results_come_along(tmp_path):
    a, b = two()
    screen = FakeScreen()
    followed = launched(tmp_path, a, b, screen=screen)
    assert followed.state.phase == "done"
    assert [worker.phase for worker in followed.state.workers.values()] == [
        "done",
        "done",
    ]
    assert followed.small_results == {(0, 0): RESULT, (1, 1): RESULT}
    assert followed.host_indices == (0, 1)
    assert not followed.was_interrupted
    assert screen.finished == [followed.state]
    assert_left(a, b)


def test_what_was_sent_is_kept_here_while_the_run_goes_on(tmp_path, monkeypatch):
    """Nobody touches it here else, and a host that comes later gets it from here."""
    monkeypatch.setattr(blobs, "_TOUCH_S", 0.01)
    a, b = two(runs_on)
    payload = payload_in(tmp_path)

    def age(state: RunState) -> None:
        if has_ranks(state) and not screen.clicks:
            for local in payload.blobs:
                os.utime(local.path, (1, 1))
            for local in payload.blobs:
                wait_until(
                    lambda local=local: local.path.stat().st_mtime > 1, "a touch"
                )
            screen.clicks.append("stop")

    screen = FakeScreen(age)
    launched(tmp_path, a, b, screen=screen, payload=payload)
    assert len(payload.blobs) == 2


def test_every_node_is_told_its_part_of_one_plan(tmp_path):
    a, b = two()
    launched(tmp_path, a, b, spec=JobSpec(timeout_s=90.0))
    (first,), (second,) = a.requests_of(p.StartNode), b.requests_of(p.StartNode)
    assert (first.job, first.node_rank, first.lead, second.node_rank, second.lead) == (
        "j",
        0,
        True,
        1,
        False,
    )
    assert first.hosts == second.hosts == ("gpu-a", "gpu-b")
    assert (
        first.terms
        == second.terms
        == p.JobTerms(
            lease_s=60.0,
            owner="nb",
            timeout_s=90.0,
            min_nodes=2,
            call="train(3)",
            ranks=2,
        )
    )
    assert first.membership.secret == second.membership.secret


def test_a_host_that_can_not_be_reached_ends_it_before_anything_is_started(tmp_path):
    a, b = two()
    b.error = down("gpu-b")
    screen = FakeScreen()
    with pytest.raises(Unreachable) as caught:
        launched(tmp_path, a, b, screen=screen)
    assert caught.value is b.error
    assert a.requests == []
    assert [state.abandoned for state in screen.finished] == [caught.value.message]
    assert_left(a)


def test_a_bug_of_a_screen_while_hosts_are_reached_closes_the_links(
    tmp_path, monkeypatch
):
    a, b = two()
    may_answer = threading.Event()
    connect = b.connect

    def connect_late() -> FakeConnection:
        assert may_answer.wait(HANG_S)
        return connect()

    def break_down(_: RunState) -> None:
        may_answer.set()
        raise RuntimeError("a bug")

    monkeypatch.setattr(b, "connect", connect_late)
    reaching = reach(a, b)
    reaching.futures[0].result(HANG_S)
    with pytest.raises(RuntimeError, match="a bug"):
        launched(tmp_path, reaching=reaching, screen=FakeScreen(break_down))
    assert reaching.futures[1].result(HANG_S)
    assert_left(a, b)


def test_a_host_that_can_not_be_planned_for_ends_it_and_the_links_are_closed(tmp_path):
    a, b = two()
    b.facts = replace(b.facts, torch=None)
    screen = FakeScreen()
    with pytest.raises(PreflightError, match="torch") as caught:
        launched(tmp_path, a, b, screen=screen)
    assert caught.value.host == "gpu-b"
    assert [state.abandoned for state in screen.finished] == [caught.value.message]
    assert a.is_left
    assert b.is_left
    assert a.requests_of(p.StartNode) == b.requests_of(p.StartNode) == []


def test_for_another_python_the_payload_is_packed_without_byte_code(tmp_path):
    a, b = two()
    a.python, b.python = (3, 99, 1), (3, 98, 0)
    asked = []

    def in_source(other: OtherPython) -> Payload:
        asked.append(other)
        return replace(payload_in(tmp_path), call=keep(b"the same as text", tmp_path))

    payload = replace(payload_in(tmp_path), title="train()", in_source=in_source)
    followed = launched(tmp_path, a, b, payload=payload)
    assert followed.state.phase == "done"
    assert asked == [OtherPython(host="gpu-b", version=(3, 98))]
    for host in (a, b):
        (start,) = host.requests_of(p.StartNode)
        assert start.call == hashlib.sha256(b"the same as text").hexdigest()


def test_what_can_not_be_packed_for_another_python_ends_it_and_nothing_is_started(
    tmp_path,
):
    a, b = two()
    b.python = (3, 99, 1)

    def in_source(other: OtherPython) -> Payload:
        raise PayloadError(f"`f` can't travel to {other.host}.")

    payload = replace(payload_in(tmp_path), in_source=in_source)
    with pytest.raises(PayloadError, match="gpu-b"):
        launched(tmp_path, a, b, payload=payload)
    assert a.requests_of(p.StartNode) == b.requests_of(p.StartNode) == []


def test_where_all_pythons_are_the_notebook_s_the_byte_code_goes(tmp_path):
    a, b = two()
    payload = replace(payload_in(tmp_path), in_source=pytest.fail)
    assert launched(tmp_path, a, b, payload=payload).state.phase == "done"


def test_a_job_of_this_notebook_that_still_runs_there_is_in_the_way(tmp_path, golden):
    a, b = two()
    terms = p.JobTerms(lease_s=60.0, owner="nb")
    b.facts = replace(b.facts, running=(listing("j-0", 0, [b], terms=terms),))
    with golden.raises(UsageError):
        launched(tmp_path, a, b)
    assert a.is_left
    assert b.is_left


def test_a_job_that_this_very_kernel_follows_is_in_nobody_s_way(tmp_path):
    """Two runs at once on the same hosts, in two threads of one kernel."""
    a, b = two()
    terms = p.JobTerms(lease_s=60.0, owner="nb")
    b.facts = replace(b.facts, running=(listing("j-0", 0, [b], terms=terms),))
    followed = launch.launch(
        reach(a, b),
        JobSpec(),
        payload_in(tmp_path),
        FakeScreen(),
        "j",
        "nb",
        WORK,
        {"j-0"},
    )
    assert followed.state.phase == "done"


@pytest.mark.parametrize("refuses", ["the plan", "the start"])
def test_links_of_warm_hosts_are_kept_for_the_next_cell_when_a_host_can_not_run_this_one(
    tmp_path, refuses
):
    a, b = two()
    if refuses == "the plan":
        b.facts = replace(b.facts, torch=None)
    else:
        for host in (a, b):
            host.answers[p.StartNode] = lambda _: [
                p.Refused(what="start_node", error="there is no directory /data")
            ]
    reaching = reach(a, b)
    for link in reaching.wait().values():
        link.kept = p.TemplateRequest(
            owner="nb", idle_s=900.0, lease_s=60.0, env={}, defaults={}
        )
    with pytest.raises((PreflightError, HostErrors)):
        launched(tmp_path, reaching=reaching)
    assert [
        process.is_closed.is_set() for host in (a, b) for process in host.processes
    ] == [False, False]
    a.answers, b.answers, b.facts = {}, {}, a.facts
    connections = reaching.opener.connections
    again = FirstLinks(reaching.opener, WarmHosts(connections))
    assert launched(tmp_path, reaching=again).state.phase == "done"
    assert [len(host.processes) for host in (a, b)] == [1, 1], "the same links"
    connections.close()


def test_the_nodes_meet_at_a_port_that_is_free_when_they_start(tmp_path):
    """The one that was free when the host was reached may be taken by now: a payload can take minutes."""
    a, b = two()
    taken = a.facts.free_port
    a.free_port = taken + 1
    launched(tmp_path, a, b)
    for host in (a, b):
        (start,) = host.requests_of(p.StartNode)
        assert f"--master-port={taken + 1}" in start.torchrun
        assert (start.endpoint, start.membership.port) == (
            f"10.0.0.1 {taken + 1}",
            taken + 1,
        )
    kinds = [type(request) for request in a.requests]
    assert (
        kinds.index(p.OfferBlobs)
        < kinds.index(p.GetFreePort)
        < kinds.index(p.StartNode)
    )
    assert a.requests_of(p.GetFreePort) == [p.GetFreePort(address="10.0.0.1")]


@pytest.mark.parametrize(
    ("spec", "chose_port"),
    [
        (JobSpec(), True),
        (JobSpec(rdzv_endpoint="10.0.0.1"), True),
        (JobSpec(master_port=29600), False),
        (JobSpec(rdzv_endpoint="10.0.0.1:29600"), False),
    ],
    ids=["nothing", "an address", "a port", "both"],
)
def test_the_state_knows_whether_the_user_has_named_the_port(
    tmp_path, spec, chose_port
):
    followed = launched(tmp_path, *two(), spec=spec)
    assert followed.state.chose_port == chose_port


def test_a_host_on_which_no_port_can_be_tried_has_the_port_of_before(tmp_path):
    a, b = two()
    a.answers[p.GetFreePort] = lambda _: [
        p.Refused(what="get_free_port", error="Cannot assign requested address")
    ]
    launched(tmp_path, a, b)
    assert (
        f"--master-port={a.facts.free_port}" in a.requests_of(p.StartNode)[0].torchrun
    )


def test_a_host_that_has_started_keeps_its_lease_while_another_one_starts_slowly(
    tmp_path,
):
    a, b = two()
    renewed: list[bool] = []

    def starts_slowly(_: p.Message) -> list[p.Message]:
        wait_until(
            lambda: len(a.requests_of(p.RenewLease)) > 2,
            "the lease of gpu-a to be renewed",
        )
        renewed.append(True)
        del b.answers[p.StartNode]
        b.receive(b.processes[0], b.requests_of(p.StartNode)[0])
        return []

    b.answers[p.StartNode] = starts_slowly
    followed = launched(tmp_path, reaching=reach(a, b, access=Access(lease_s=1.0)))
    assert renewed == [True]
    assert followed.state.phase == "done"


def test_a_host_that_refuses_its_files_ends_it_and_nothing_is_started(tmp_path):
    a, b = two()
    b.answers[p.OfferBlobs] = lambda _: [p.Refused(what="offer_blobs", error="no room")]
    with pytest.raises(PreflightError) as caught:
        launched(tmp_path, a, b)
    assert caught.value.message == "gpu-b: no room."
    assert a.requests_of(p.StartNode) == b.requests_of(p.StartNode) == []
    assert a.is_left
    assert b.is_left


def test_what_hosts_say_of_their_working_directories_is_told_once(tmp_path):
    hosts = [FakeHost(name) for name in ("gpu-a", "gpu-b", "gpu-c", "gpu-d")]
    for host, notice in zip(hosts, ("kept: x", "", "kept: y", "kept: x"), strict=True):
        host.work_notice = notice
    notices = launched(tmp_path, *hosts).state.notices
    assert notices[:2] == ("gpu-a, gpu-d: kept: x", "gpu-c: kept: y")


@pytest.mark.parametrize(("gpus", "is_told"), [(2, True), (0, False)])
def test_the_notebooks_choice_of_the_cpu_is_told_where_hosts_have_gpus(
    gpus, is_told, tmp_path
):
    hosts = two()
    hosts[1].facts = replace(hosts[1].facts, gpus=gpus)
    chosen = replace(payload_in(tmp_path), device="device is cpu")
    spec = JobSpec(nproc_per_node=1)
    notices = launched(tmp_path, *hosts, spec=spec, payload=chosen).state.notices
    told = "device is cpu, as chosen in the notebook, and the hosts have GPUs. To use them, choose it in the function."
    assert (told in notices) is is_told


def test_a_host_that_refuses_to_start_has_the_others_stopped(tmp_path, golden):
    a, b = two(runs_on)
    b.answers[p.StartNode] = lambda _: [
        p.Refused(what="start_node", error="there is no directory /data")
    ]
    with golden.raises(PreflightError):
        launched(tmp_path, a, b)
    assert a.requests_of(p.StopNode) == [
        p.StopNode(grace_s=0.0, reason="another host could not start")
    ]
    assert a.is_left
    assert b.is_left


def test_a_host_that_is_lost_in_its_start_has_the_others_stopped_and_the_hint_says_so(
    tmp_path, golden
):
    a, b = two(runs_on)
    b.answers[p.StartNode] = lambda _: HANG_UP
    with golden.raises(ConnectionLost):
        launched(tmp_path, a, b)
    assert len(a.requests_of(p.StopNode)) == 1
    assert a.is_left
    assert b.is_left


# ---- elastic jobs, lost nodes, jobs that are let go


ELASTIC = JobSpec(nnodes=(1, 2), max_restarts=1)


def test_an_elastic_job_begins_without_a_host_that_is_down(tmp_path, golden):
    a, b = two()
    b.error = down("gpu-b")
    followed = launched(tmp_path, a, b, spec=ELASTIC)
    assert [node.host for node in followed.state.nodes] == ["gpu-a"]
    assert followed.state.phase == "done"
    golden(*followed.state.notices)
    (start,) = a.requests_of(p.StartNode)
    assert start.terms.awaited == ("gpu-b",)
    assert followed.host_indices == (0,)


def test_a_node_whose_agent_is_gone_is_lost_and_what_it_left_is_swept(
    tmp_path, monkeypatch
):
    a, b = two(runs_on)
    closed: list[FakeConnection] = []
    close = FakeConnection.close

    def note_and_close(connection: FakeConnection) -> None:
        closed.append(connection)
        close(connection)

    monkeypatch.setattr(FakeConnection, "close", note_and_close)
    b.answers[p.SweepJob] = lambda _: [
        p.Final(reason="swept", survivors=("python (pid 7, D)",))
    ]

    followed = launched(tmp_path, a, b, screen=killed_agent(b, "Killed"))
    assert followed.state.lost == {1: "its agent broke down: Killed"}
    assert [request.reason for request in a.requests_of(p.StopNode)] == ["lost"]
    assert b.requests_of(p.SweepJob) == [p.SweepJob(job="j", node_rank=1)]
    assert followed.state.nodes[1].survivors == ("python (pid 7, D)",)
    assert_left(a, b)
    assert closed == [], "another run of this kernel may be over that connection"


def test_a_lost_host_that_answers_when_the_run_is_over_is_hung_up_on(
    tmp_path, monkeypatch
):
    """The attempt to reach it again was under way yet, and nobody took its link any more."""
    monkeypatch.setattr(decide, "NODE_LOST_S", 0.5)  # an attempt begins after 0.25 s
    a, b = two(runs_on)

    def swept_later(_: p.Message) -> list[p.Message]:
        wait_until(lambda: b.requests_of(p.FollowJob), "the attempt to succeed")
        return [p.Final(reason="swept")]

    b.answers[p.SweepJob] = swept_later

    def cut(state: RunState) -> None:
        if has_ranks(state) and "boot" not in b.barriers:
            # It answers both together: the attempt, and the sweep.
            b.barriers["boot"] = threading.Barrier(2)
            b.cut()

    followed = launched(tmp_path, a, b, screen=FakeScreen(cut))
    assert list(followed.state.lost) == [1]
    assert_left(a, b)


def test_a_broken_connection_is_mended_and_no_event_is_lost(tmp_path):
    a, b = two(runs_on)

    def act(state: RunState) -> None:
        if has_ranks(state) and len(b.processes) == 1:
            b.cut()
        elif len(b.requests_of(p.FollowJob)) == 1:
            for host in (a, b):
                if len(host.events) == 2:
                    host.agent_sends(
                        *runs_to_its_end(host.requests_of(p.StartNode)[0])[1:]
                    )

    followed = launched(tmp_path, a, b, screen=FakeScreen(act))
    assert b.requests_of(p.FollowJob) == [p.FollowJob(job="j", node_rank=1, after=2)]
    assert followed.state.phase == "done"
    assert followed.small_results == {(0, 0): RESULT, (1, 1): RESULT}


def test_a_bug_of_a_screen_stops_the_ranks_and_closes_the_links(tmp_path):
    a, b = two(runs_on)

    def break_down(state: RunState) -> None:
        if has_ranks(state):
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        launched(tmp_path, a, b, screen=FakeScreen(break_down))
    for host in (a, b):
        assert [(one.grace_s, one.reason) for one in host.requests_of(p.StopNode)] == [
            (0.0, "abandoned")
        ]
    assert_left(a, b)
