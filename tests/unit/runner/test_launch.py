"""A run from its beginning to its end: the two scripts `launch` and `attach`, over hosts that answer by script."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distmagic.connection.reach import Reaching
from distmagic.errors import Cancelled, ConnectionLost, HostErrors, PreflightError, SpecError, Unreachable
from distmagic.planning.jobs import Job, found_jobs
from distmagic.planning.plan import make_plan
from distmagic.remote.wire import protocol as p
from distmagic.request.spec import JobSpec
from distmagic.runner import rollback, run_loop
from distmagic.runner.launch import Followed, attach, launch, lost_at_start
from distmagic.state.model import RunState
from tests.builders.hosts import (
    HANG_UP,
    RESULT,
    FakeHost,
    down,
    fails,
    listing,
    payload_in,
    reach,
    runs_on,
    runs_to_its_end,
)
from tests.builders.messages import START
from tests.builders.plans import A, B, reached
from tests.builders.runs import FakeScreen
from tests.lab import wait_until

C = reached("gpu-c", "10.0.0.3", "eth1", slots="gpu", gpus=4)
GONE = ConnectionLost("gpu-b: the connection ended.", "")


@pytest.mark.parametrize(
    ("spec", "errors", "lost"),
    [
        ({}, [None, GONE, None], {1: "gpu-b: the connection ended."}),
        ({}, [None, None, None], {}),
        ({}, [GONE, None, None], {}),
        ({"nnodes": (3, 4)}, [None, GONE, None], {}),
        ({"max_restarts": 0}, [None, GONE, None], {}),
        ({}, [None, GONE, PreflightError("gpu-c", "has no room", "")], {}),
        ({}, [None, GONE, KeyboardInterrupt()], {}),
    ],
)
def test_an_elastic_job_begins_without_hosts_that_are_lost_in_the_moment_of_its_start(spec, errors, lost):
    plan = make_plan(
        JobSpec(**{"nnodes": (1, 4), "max_restarts": 3, **spec}),
        (A, B, C),
        job="j-1",
        lease_s=60.0,
        owner="nb",
        local_cwd="/nb",
    )
    assert lost_at_start(plan, errors) == lost


# ---- launch


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))


def launched(
    tmp_path: Path, *hosts: FakeHost, spec: JobSpec | None = None, screen: FakeScreen | None = None,
    reaching: Reaching | None = None,
) -> Followed:  # fmt: skip
    """Launch job "j" of the notebook "nb" on hosts, and follow it."""
    reaching = reaching or reach(*hosts)
    return launch(reaching, spec or JobSpec(), payload_in(tmp_path), screen or FakeScreen(), "j", "nb")


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def pressing(*answer: p.Message | bytes) -> Callable[[p.Message], tuple[p.Message | bytes, ...]]:
    """Return an answer of a host, before which the user interrupts."""

    def answer_then(_: p.Message) -> tuple[p.Message | bytes, ...]:
        press()
        return answer

    return answer_then


class PressingScreen(FakeScreen):
    """Interrupts once, when a state is shown that is wanted."""

    def __init__(self, wants: Callable[[RunState], object]) -> None:
        super().__init__(self.look)
        self.wants, self.has_pressed = wants, False

    def look(self, state: RunState) -> None:
        if not self.has_pressed and self.wants(state):
            self.has_pressed = True
            press()


def runs(state: RunState) -> bool:
    return state.phase == "running"


def assert_left(*hosts: FakeHost) -> None:
    for host in hosts:
        wait_until(lambda host=host: host.is_left, f"the links to {host.host.name} to be closed")


def two(begins: Callable[[p.StartNode], list[p.Message]] = runs_to_its_end) -> tuple[FakeHost, FakeHost]:
    return FakeHost("gpu-a", begins), FakeHost("gpu-b", begins)


def test_a_run_is_followed_to_its_end_and_small_results_come_along(tmp_path):
    a, b = two()
    screen = FakeScreen()
    followed = launched(tmp_path, a, b, screen=screen)
    assert followed.state.phase == "done"
    assert [worker.phase for worker in followed.state.workers.values()] == ["done", "done"]
    assert followed.small_results == {(0, 0): RESULT, (1, 1): RESULT}
    assert followed.host_indices == (0, 1)
    assert not followed.was_interrupted
    assert screen.finished == [followed.state]
    assert_left(a, b)


def test_every_node_is_told_its_part_of_one_plan(tmp_path):
    a, b = two()
    launched(tmp_path, a, b, spec=JobSpec(timeout_s=90.0))
    (first,), (second,) = a.requests_of(p.StartNode), b.requests_of(p.StartNode)
    assert (first.job, first.node_rank, first.lead, second.node_rank, second.lead) == ("j", 0, True, 1, False)
    assert first.hosts == second.hosts == ("gpu-a", "gpu-b")
    assert first.terms == second.terms == p.JobTerms(lease_s=60.0, owner="nb", timeout_s=90.0, min_nodes=2)
    assert first.membership.secret == second.membership.secret


def test_a_rank_that_fails_stops_the_others(tmp_path):
    a, b = FakeHost("gpu-a", runs_on), FakeHost("gpu-b", fails)
    followed = launched(tmp_path, a, b)
    assert (followed.state.phase, followed.state.first_failure) == ("failed", 1)
    assert [request.reason for request in a.requests_of(p.StopNode)] == ["failed"]
    assert_left(a, b)


def test_a_host_that_can_not_be_reached_ends_it_before_anything_is_started(tmp_path):
    a, b = two()
    b.error = down("gpu-b")
    screen = FakeScreen()
    with pytest.raises(Unreachable, match=r"^gpu-b: no answer\."):
        launched(tmp_path, a, b, screen=screen)
    assert a.requests == []
    assert [state.abandoned for state in screen.finished] == ["gpu-b: no answer."]
    assert_left(a)


def test_a_host_that_can_not_be_planned_for_ends_it_and_the_links_are_closed(tmp_path):
    a, b = two()
    b.facts = replace(b.facts, torch=None)
    screen = FakeScreen()
    with pytest.raises(PreflightError, match=r"^gpu-b: Python /usr/bin/python3 has no torch\."):
        launched(tmp_path, a, b, screen=screen)
    assert [state.abandoned for state in screen.finished] == ["gpu-b: Python /usr/bin/python3 has no torch."]
    assert a.is_left
    assert b.is_left
    assert a.requests_of(p.StartNode) == b.requests_of(p.StartNode) == []


def test_a_job_of_this_notebook_that_still_runs_there_is_in_the_way(tmp_path):
    a, b = two()
    terms = p.JobTerms(lease_s=60.0, owner="nb")
    b.facts = replace(b.facts, running=(listing("j-0", 0, [b], terms=terms),))
    with pytest.raises(SpecError, match=r"^Job j-0, which this notebook began, still runs on gpu-b\."):
        launched(tmp_path, a, b)
    assert a.is_left
    assert b.is_left


def test_a_host_that_refuses_its_files_ends_it_and_nothing_is_started(tmp_path):
    a, b = two()
    b.answers[p.OfferBlobs] = lambda _: [p.Refused(what="offer_blobs", error="no room")]
    with pytest.raises(PreflightError) as caught:
        launched(tmp_path, a, b)
    assert caught.value.message == "gpu-b: no room."
    assert a.requests_of(p.StartNode) == b.requests_of(p.StartNode) == []
    assert a.is_left
    assert b.is_left


def test_a_host_that_refuses_to_start_has_the_others_stopped(tmp_path):
    a, b = two(runs_on)
    b.answers[p.StartNode] = lambda _: [p.Refused(what="start_node", error="there is no directory /data")]
    with pytest.raises(PreflightError) as caught:
        launched(tmp_path, a, b)
    assert str(caught.value) == (
        "gpu-b: there is no directory /data.\n"
        "Mend this on the host, or choose another directory with --cwd or DISTMAGIC_HOME."
    )
    assert a.requests_of(p.StopNode) == [p.StopNode(grace_s=0.0, reason="another host could not start")]
    assert a.is_left
    assert b.is_left


def test_a_host_that_is_lost_in_its_start_has_the_others_stopped_and_the_hint_says_so(tmp_path):
    a, b = two(runs_on)
    b.answers[p.StartNode] = lambda _: HANG_UP
    with pytest.raises(ConnectionLost) as caught:
        launched(tmp_path, a, b)
    assert str(caught.value) == (
        "gpu-b: the connection ended.\n"
        "What had started elsewhere was stopped. Look at that host's memory and disk, and run it again."
    )
    assert len(a.requests_of(p.StopNode)) == 1
    assert a.is_left
    assert b.is_left


# ---- an interrupt in each stage


def cancelled(tmp_path: Path, *hosts: FakeHost) -> str:
    """Launch a job that is interrupted before it has begun; return the error's text."""
    screen = FakeScreen()
    with pytest.raises(Cancelled) as caught:
        launched(tmp_path, *hosts, screen=screen)
    assert [(state.phase, state.abandoned) for state in screen.finished] == [("stopped", caught.value.message)]
    assert_left(*hosts)
    return str(caught.value)


def test_an_interrupt_while_hosts_are_reached(tmp_path, monkeypatch):
    a, b = two()
    may_answer = threading.Event()
    connect = b.connect

    def connect_late() -> Any:
        assert may_answer.wait(30)
        return connect()

    monkeypatch.setattr(b, "connect", connect_late)
    reaching = reach(a, b)
    reaching.futures[0].result(30)
    try:
        with pytest.raises(Cancelled) as caught:
            launched(tmp_path, reaching=reaching, screen=PressingScreen(lambda state: True))
    finally:
        may_answer.set()
    assert str(caught.value) == (
        "Interrupted while the hosts were being reached; nothing was started.\nNo answer had come yet from gpu-b."
    )
    assert reaching.futures[1].result(30)
    assert_left(a, b)


def test_an_interrupt_while_hosts_are_planned_for(tmp_path):
    a, b = two()
    a.answers[p.GetRoute] = pressing()
    assert cancelled(tmp_path, a, b) == "Interrupted; nothing was started."


def test_an_interrupt_while_hosts_are_sent_what_they_need(tmp_path):
    a, b = two()
    b.answers[p.OfferBlobs] = pressing()
    text = cancelled(tmp_path, a, b)
    assert text == "Interrupted while the hosts were being sent what they need; nothing was started."
    assert a.requests_of(p.StartNode) == b.requests_of(p.StartNode) == []


def test_an_interrupt_while_hosts_start_stops_those_that_have(tmp_path):
    a, b = two(runs_on)
    hello = p.Hello(protocol=p.PROTOCOL, job="j", node_rank=1, hostname="b", pid=9)
    b.answers[p.StartNode] = pressing(p.encode(hello, 1))
    b.answers[p.StopNode] = lambda _: [p.encode(p.Final(reason="stopped"), 2)]
    text = cancelled(tmp_path, a, b)
    assert text == "Interrupted while the hosts were starting; what had started was stopped."
    assert len(a.requests_of(p.StopNode)) == len(b.requests_of(p.StopNode)) == 1


def test_an_interrupt_while_hosts_start_names_those_that_do_not_confirm_their_end(tmp_path, monkeypatch):
    monkeypatch.setattr(rollback, "_PATIENCE_S", 0.2)
    a, b = two(runs_on)
    b.answers[p.StartNode] = pressing()
    assert cancelled(tmp_path, a, b) == (
        "Interrupted while the hosts were starting; gpu-b did not confirm that nothing runs there any more.\n"
        "What may still run on gpu-b ends by itself when its lease runs out."
    )


def test_an_interrupt_of_a_run_stops_every_rank_and_the_run_is_left(tmp_path):
    a, b = two(runs_on)
    followed = launched(tmp_path, a, b, screen=PressingScreen(runs))
    assert (followed.state.phase, followed.state.stopping) == ("stopped", "interrupted")
    for host in (a, b):
        assert host.requests_of(p.StopNode) == [p.StopNode(grace_s=run_loop.GRACE_S, reason="interrupted")]
    assert not followed.was_interrupted, "it was an interrupt of the run, not one behind it"
    assert_left(a, b)


class LatePressingScreen(FakeScreen):
    """Interrupts when the run is over."""

    def finish(self, state: RunState) -> None:
        super().finish(state)
        press()


def test_an_interrupt_of_a_run_that_is_over_does_not_take_it_away(tmp_path):
    a, b = two()
    followed = launched(tmp_path, a, b, screen=LatePressingScreen())
    assert followed.was_interrupted
    assert followed.state.phase == "done"
    assert len(followed.small_results) == 2


# ---- elastic jobs, lost nodes, jobs that are let go


ELASTIC = JobSpec(nnodes=(1, 2), max_restarts=1)


def test_an_elastic_job_begins_without_a_host_that_is_down(tmp_path):
    a, b = two()
    b.error = down("gpu-b")
    followed = launched(tmp_path, a, b, spec=ELASTIC)
    assert [node.host for node in followed.state.nodes] == ["gpu-a"]
    assert followed.state.phase == "done"
    assert followed.state.notices == ("gpu-b: no answer. The run begins without this host.",)
    (start,) = a.requests_of(p.StartNode)
    assert start.terms.awaited == ("gpu-b",)
    assert followed.host_indices == (0,)


def test_an_elastic_job_begins_without_a_host_that_is_lost_in_its_start(tmp_path):
    a, b = two()
    b.answers[p.StartNode] = lambda _: HANG_UP
    followed = launched(tmp_path, a, b, spec=ELASTIC)
    assert followed.state.lost == ((1, "gpu-b: the connection ended."),)
    assert followed.state.workers[0].phase == "done"
    assert b.requests_of(p.SweepJob) == [p.SweepJob(job="j")]


def test_a_node_whose_agent_is_gone_is_lost_and_what_it_left_is_swept(tmp_path):
    a, b = two(runs_on)
    b.answers[p.SweepJob] = lambda _: [p.Final(reason="swept", survivors=("python (pid 7, D)",))]

    def agent_is_killed(state: RunState) -> None:
        if runs(state):
            b.processes[0].put(p.AgentGone(error="Killed"))

    followed = launched(tmp_path, a, b, screen=FakeScreen(agent_is_killed))
    assert followed.state.lost == ((1, "its agent broke down: Killed"),)
    assert [request.reason for request in a.requests_of(p.StopNode)] == ["lost"]
    assert b.requests_of(p.SweepJob) == [p.SweepJob(job="j")]
    assert followed.state.nodes[1].survivors == ("python (pid 7, D)",)
    assert_left(a, b)


def test_a_lost_node_that_can_not_be_reached_any_more_is_left_to_its_lease(tmp_path):
    a, b = two(runs_on)

    def host_is_gone(state: RunState) -> None:
        if runs(state):
            b.error = down("gpu-b")
            b.processes[0].put(p.AgentGone())

    followed = launched(tmp_path, a, b, screen=FakeScreen(host_is_gone))
    assert [node for node, _ in followed.state.lost] == [1]
    assert b.requests_of(p.SweepJob) == []
    assert_left(a, b)


def test_a_host_that_refuses_the_sweep_is_hung_up_on(tmp_path):
    a, b = two(runs_on)
    b.answers[p.SweepJob] = lambda _: [p.Refused(what="sweep_job", error="no room")]

    def agent_is_killed(state: RunState) -> None:
        if runs(state):
            b.processes[0].put(p.AgentGone())

    followed = launched(tmp_path, a, b, screen=FakeScreen(agent_is_killed))
    assert [node for node, _ in followed.state.lost] == [1]
    assert len(b.requests_of(p.SweepJob)) == 1
    assert_left(a, b)


def test_an_interrupt_of_the_sweep_gives_it_up(tmp_path):
    a, b = two(runs_on)
    b.answers[p.SweepJob] = pressing()

    def agent_is_killed(state: RunState) -> None:
        if runs(state):
            b.processes[0].put(p.AgentGone())

    followed = launched(tmp_path, a, b, screen=FakeScreen(agent_is_killed))
    assert [node for node, _ in followed.state.lost] == [1]
    b.cut()  # ends the sweep, which nobody waits for any more


def test_a_broken_connection_is_mended_and_no_event_is_lost(tmp_path):
    a, b = two(runs_on)

    def act(state: RunState) -> None:
        if runs(state) and len(b.processes) == 1:
            b.cut()
        elif len(b.requests_of(p.FollowJob)) == 1:
            for host in (a, b):
                if len(host.events) == 2:
                    host.agent_sends(*runs_to_its_end(host.requests_of(p.StartNode)[0])[1:])

    followed = launched(tmp_path, a, b, screen=FakeScreen(act))
    assert b.requests_of(p.FollowJob) == [p.FollowJob(job="j", node_rank=1, after=2)]
    assert followed.state.phase == "done"
    assert followed.small_results == {(0, 0): RESULT, (1, 1): RESULT}


def test_a_job_that_is_to_be_detached_is_left_as_soon_as_it_runs(tmp_path):
    a, b = two(runs_on)
    a.begins = lambda start: [*runs_on(start), p.PeerState(node_rank=1, state="joined")]
    a.answers[p.DetachJob] = lambda _: a.agent_sends(p.Detached(why="asked")) or ()
    screen = FakeScreen()
    followed = launched(tmp_path, a, b, spec=JobSpec(detach=True), screen=screen)
    assert followed.state.detached_by
    assert not followed.state.is_over
    assert followed.host_indices == (0, 1)
    assert a.requests_of(p.StopNode) == b.requests_of(p.StopNode) == []
    assert screen.finished == []
    assert_left(a, b)


def test_a_bug_of_a_screen_stops_the_ranks_and_closes_the_links(tmp_path):
    a, b = two(runs_on)

    def break_down(state: RunState) -> None:
        if runs(state):
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        launched(tmp_path, a, b, screen=FakeScreen(break_down))
    for host in (a, b):
        assert [(one.grace_s, one.reason) for one in host.requests_of(p.StopNode)] == [(0.0, "abandoned")]
    assert_left(a, b)


# ---- attach


def begun(*hosts: FakeHost, **more: object) -> Job:
    """Have hosts run job "j", and return it as it is found there."""
    for node_rank, host in enumerate(hosts):
        host.listings = (listing("j", node_rank, hosts, **more),)
        start = replace(START, job="j", node_rank=node_rank, hosts=tuple(one.host.name for one in hosts))
        host.results[f"rank{node_rank}.result"] = RESULT
        hello = p.Hello(protocol=p.PROTOCOL, job="j", node_rank=node_rank, hostname=host.host.name, pid=9)
        host.agent_sends(hello, *host.begins(start))
    (job,) = found_jobs([host.listings for host in hosts])
    return job


def test_a_job_is_followed_from_its_first_event(tmp_path):
    a, b = two()
    job = begun(a, b, age_s=7.0)
    screen = FakeScreen()
    followed = attach(reach(a, b), job, screen)
    assert followed.state.phase == "done"
    assert followed.state.before_s == 7.0
    assert followed.small_results == {(0, 0): RESULT, (1, 1): RESULT}
    assert followed.host_indices == (0, 1)
    assert screen.finished == [followed.state]
    assert b.requests_of(p.FollowJob) == [p.FollowJob(job="j", node_rank=1)]
    assert_left(a, b)


def test_a_host_that_is_absent_is_tried_again_and_followed_when_it_is_back(tmp_path):
    a, b = two()
    job = begun(a, b)
    b.error = down("gpu-b")

    def comes_back(state: RunState) -> None:
        if runs(state):
            b.error = None

    screen = FakeScreen(comes_back)
    followed = attach(reach(a, b), job, screen)
    assert followed.state.phase == "done"
    assert followed.state.notices == ("gpu-b: no answer. It is tried again.",)
    assert followed.small_results == {(0, 0): RESULT, (1, 1): RESULT}


def test_a_job_none_of_whose_hosts_is_up_is_not_followed():
    a, b = two()
    job = begun(a, b)
    a.error = b.error = down("gpu-a")
    screen = FakeScreen()
    with pytest.raises(HostErrors, match="2 hosts can't be used"):
        attach(reach(a, b), job, screen)
    assert len(screen.finished) == 1


def test_a_host_that_is_lost_before_it_is_asked_is_tried_again():
    a, b = two()
    job = begun(a, b)

    reaching = reach(a, b)
    reaching.futures[1].result(30)
    b.cut()
    followed = attach(reaching, job, FakeScreen())
    assert len(b.processes) == 2
    assert followed.state.phase == "done"
    assert_left(a, b)


def test_an_interrupt_ends_a_job_that_is_followed():
    a, b = two(runs_on)
    job = begun(a, b)
    followed = attach(reach(a, b), job, PressingScreen(runs))
    assert (followed.state.phase, followed.state.stopping) == ("stopped", "interrupted")
    assert len(a.requests_of(p.StopNode)) == len(b.requests_of(p.StopNode)) == 1


def test_an_interrupt_of_a_detached_job_only_ends_the_following():
    a, b = two(runs_on)
    job = begun(a, b)
    a.agent_sends(p.Detached(why="asked"))
    screen = PressingScreen(lambda state: state.detached_by)
    followed = attach(reach(a, b), job, screen)
    assert not followed.state.is_over
    assert a.requests_of(p.StopNode) == b.requests_of(p.StopNode) == []
    assert screen.finished == []
    assert_left(a, b)
