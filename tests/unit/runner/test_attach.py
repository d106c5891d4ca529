"""A job that is followed by another notebook than the one that began it, over hosts that answer by script."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from distmagic.errors import HostErrors, UsageError
from distmagic.remote.wire import protocol as p
from distmagic.runner.launch import attach
from distmagic.state.model import RunState
from tests.builders.hosts import RESULT, FakeHost, down, reach, runs_on
from tests.builders.jobs import PressingScreen, assert_left, begun, has_ranks, two
from tests.builders.runs import FakeScreen
from tests.lab.waiting import HANG_S


def test_a_job_is_followed_from_its_first_event(tmp_path):
    a, b = two()
    job = begun(a, b, age_s=7.0, began_ago_s=3600.0)
    screen = FakeScreen()
    before_s = time.time()
    followed = attach(reach(a, b), job, screen)
    assert followed.state.phase == "done"
    assert followed.state.before_s == 7.0
    assert before_s <= followed.state.began_unix_s + 3600.0 <= time.time()
    assert followed.small_results == {(0, 0): RESULT, (1, 1): RESULT}
    assert followed.host_indices == (0, 1)
    assert screen.finished == [followed.state]
    assert b.requests_of(p.FollowJob) == [p.FollowJob(job="j", node_rank=1)]
    assert_left(a, b)


def test_a_host_that_is_absent_is_tried_again_and_followed_when_it_is_back(
    tmp_path, golden
):
    a, b = two()
    job = begun(a, b)
    b.error = down("gpu-b")

    def comes_back(state: RunState) -> None:
        if has_ranks(state):
            b.error = None

    screen = FakeScreen(comes_back)
    followed = attach(reach(a, b), job, screen)
    assert followed.state.phase == "done"
    golden(*followed.state.notices)
    assert followed.small_results == {(0, 0): RESULT, (1, 1): RESULT}


def test_a_job_none_of_whose_hosts_is_up_is_not_followed():
    a, b = two()
    job = begun(a, b)
    a.error = b.error = down("gpu-a")
    screen = FakeScreen()
    with pytest.raises(HostErrors) as caught:
        attach(reach(a, b), job, screen)
    assert caught.value.errors == (a.error, b.error)
    assert len(screen.finished) == 1


def test_a_host_that_is_lost_before_it_is_asked_is_tried_again():
    a, b = two()
    job = begun(a, b)

    reaching = reach(a, b)
    reaching.futures[1].result(HANG_S)
    b.cut()
    followed = attach(reaching, job, FakeScreen())
    assert len(b.processes) == 2
    assert followed.state.phase == "done"
    assert_left(a, b)


def test_an_interrupt_ends_a_job_that_is_followed():
    a, b = two(runs_on)
    job = begun(a, b)
    followed = attach(reach(a, b), job, PressingScreen(has_ranks))
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


def test_a_job_of_another_version_is_neither_followed_nor_ended():
    a, b = two(runs_on)
    job = replace(begun(a, b), protocols=(1,))
    with pytest.raises(UsageError) as refused:
        attach(reach(a, b), job, FakeScreen())
    assert refused.value.message == f"{p.another_version('j', 1)}."
    assert a.requests_of(p.StopNode) == a.requests_of(p.SweepJob) == []


def test_what_is_lost_of_a_job_that_needs_no_notebook_is_not_ended():
    """The agent refuses to tell of the job just now, and its host could be reached for a sweep."""
    a, b = two(runs_on)
    job = replace(begun(a, b), is_detached=True)
    for host in (a, b):
        host.answers[p.FollowJob] = lambda _: [p.Refused(what="f", error="no")]
    followed = attach(reach(a, b), job, FakeScreen())
    assert list(followed.state.lost) == [0, 1]
    assert a.requests_of(p.SweepJob) == b.requests_of(p.SweepJob) == []
    assert a.requests_of(p.StopNode) == b.requests_of(p.StopNode) == []


def test_what_a_killed_agent_of_a_detached_job_left_is_ended():
    a = FakeHost("gpu-a", runs_on)
    job = replace(begun(a), is_detached=True)
    screen = FakeScreen(
        lambda state: has_ranks(state) and a.processes[0].put(p.AgentGone())
    )
    followed = attach(reach(a), job, screen)
    assert list(followed.state.lost) == [0]
    assert a.requests_of(p.SweepJob) == [p.SweepJob(job="j", node_rank=0)]


def test_what_a_lost_node_of_a_detached_job_left_is_not_swept_by_a_notebook_that_only_leaves():
    a, b = two(runs_on)
    terms = p.JobTerms(lease_s=60.0, max_restarts=3, min_nodes=1, max_nodes=2)
    job = begun(a, b, terms=terms)
    a.agent_sends(p.Detached(why="asked"))

    def agent_is_killed(state: RunState) -> bool:
        if has_ranks(state):
            b.processes[0].put(p.AgentGone())
        return bool(state.lost)

    followed = attach(reach(a, b), job, PressingScreen(agent_is_killed))
    assert list(followed.state.lost) == [1]
    assert not followed.state.is_over
    assert a.requests_of(p.StopNode) == []
    assert b.requests_of(p.SweepJob) == []
