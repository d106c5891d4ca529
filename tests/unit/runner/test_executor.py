"""What each action of the run loop ends in: one event, whatever goes wrong, as runner/actions.py says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from distmagic.connection.link import Link
from distmagic.connection.link_opener import LinkOpener
from distmagic.connection.requests import job_requests
from distmagic.errors import ConnectionLost, PreflightError, ProtocolError
from distmagic.remote.wire import protocol as p
from distmagic.runner import executor
from distmagic.runner.actions import (
    TOO_LATE,
    Action,
    AttemptFailed,
    Close,
    Collect,
    Collected,
    Join,
    Joined,
    JoinFailed,
    Linked,
    LinkEnded,
    Listen,
    Reconnect,
    Send,
)
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.executor import Executor
from distmagic.state.events import Event
from tests.builders.hosts import FakeHost, reach
from tests.builders.jobs import listing
from tests.builders.messages import START
from tests.builders.since import Since
from tests.lab import wait_until
from tests.lab.waiting import HANG_S

LEASE_S = 0.04
ERRORS = (
    ConnectionLost("gpu-a: the connection ended."),
    PreflightError("gpu-a", "it has no torch."),
    ProtocolError("gpu-a sent nonsense."),
    RuntimeError("a bug"),
)
any_error = pytest.mark.parametrize(
    "error", ERRORS, ids=lambda error: type(error).__name__
)


class FakeJoiner:
    """Admits a host as `START`, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def admit(self, link: Link, request_id: str) -> p.StartNode:
        if self._error is not None:
            raise self._error
        return START


class Stage:
    """An executor over one host, and the queue on which its acts end."""

    def __init__(self, host: FakeHost) -> None:
        self.host = host
        self.queue = EventQueue(lambda: 1.0)
        first_links = reach(host)
        (self.link,) = first_links.wait().values()
        self.opener = first_links.opener
        self.executor = self.executor_with(None)

    def executor_with(self, joiner: Any) -> Executor:
        return Executor("j-1", self.queue, self.opener, LEASE_S, joiner)

    def events_of(self, action: Action, joiner: Any = None) -> list[Event]:
        """Perform an action, wait for the end of its thread, and return all the events that came."""
        executor = self.executor_with(joiner) if joiner is not None else self.executor
        perform(executor, action)
        return self.queue.batch(0)

    def outcomes(self, action: Action, joiner: Any = None) -> list[Any]:
        return [event.what for event in self.events_of(action, joiner)]

    def hung_up(self) -> list[bool]:
        """Return of each connection whether it is closed."""
        return [process.is_closed.is_set() for process in self.host.processes]


def perform(executor: Executor, action: Action) -> None:
    """Perform an action, and wait for the end of its thread."""
    since = Since()
    executor.perform(action)
    for thread in since.threads("distmagic-run"):
        thread.join(HANG_S)
        assert not thread.is_alive()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage(FakeHost("gpu-a"))
    yield stage
    stage.executor.close((stage.link,))
    stage.host.cut()


def broken(error: Exception):
    """Return a function that raises, in place of a method."""

    def act(*_: object, **__: object) -> Any:
        raise error

    return act


def listen(stage: Stage) -> Listen:
    return Listen(node_rank=0, link=stage.link, after=0)


def reconnect(broken_link: Link | None = None) -> Reconnect:
    return Reconnect(
        node_rank=0, host_index=0, after=2, broken=broken_link, can_ask=True
    )


MEET = Reconnect(node_rank=0, host_index=0, meets=True)
JOIN = Join(host_index=0, request_id="a1", broken=None)


# ---- Listen


def test_listening_gives_every_message_and_then_the_end_of_the_link(stage):
    stage.link.start(START)
    *messages, end = stage.outcomes(listen(stage))
    assert messages == stage.host.events
    assert end == LinkEnded(link=stage.link, last=len(messages), error=None)


def test_a_link_that_breaks_ends_with_the_number_of_the_last_event(stage):
    stage.host.begins = lambda start: [p.Notice(text="one")]
    stage.link.start(START)
    stage.host.cut()
    hello, notice, end = stage.outcomes(listen(stage))
    assert (type(hello), notice) == (p.Hello, p.Notice(text="one"))
    assert (end.link, end.last, type(end.error)) == (stage.link, 2, ConnectionLost)


@any_error
def test_listening_ends_with_whatever_went_wrong(stage, monkeypatch, error):
    monkeypatch.setattr(stage.link, "events", broken(error))
    action = Listen(node_rank=0, link=stage.link, after=7)
    assert stage.outcomes(action) == [LinkEnded(link=stage.link, last=7, error=error)]


# ---- Reconnect and Meet


def test_a_new_link_keeps_loaded_what_the_broken_one_kept(stage):
    stage.link.kept = p.TemplateRequest(
        owner="me", idle_s=9.0, lease_s=9.0, env={}, defaults={}
    )
    (linked,) = stage.outcomes(reconnect(stage.link))
    assert linked.link.kept == stage.link.kept
    assert stage.host.requests[-2:] == [
        stage.link.kept,
        p.FollowJob(job="j-1", node_rank=0, after=2),
    ]


@any_error
@pytest.mark.parametrize("action", [reconnect(), MEET], ids=["Reconnect", "Meet"])
def test_an_attempt_that_does_not_connect_fails_with_the_error(
    stage, monkeypatch, action, error
):
    monkeypatch.setattr(LinkOpener, "link", broken(error))
    assert stage.outcomes(action) == [AttemptFailed(error=error)]


@any_error
@pytest.mark.parametrize("action", [reconnect(), MEET], ids=["Reconnect", "Meet"])
def test_an_attempt_that_can_not_follow_fails_and_hangs_up(
    stage, monkeypatch, action, error
):
    stage.host.listings = (listing("j-1", 0, [stage.host]),)
    monkeypatch.setattr(Link, "attach", broken(error))
    assert stage.outcomes(action) == [AttemptFailed(error=error)]
    assert stage.hung_up() == [False, True]


def test_a_node_that_is_there_is_met_and_followed_from_its_beginning(stage):
    stage.host.listings = (listing("j-1", 0, [stage.host]),)
    (linked,) = stage.outcomes(MEET)
    assert isinstance(linked, Linked)
    assert stage.host.requests[-2:] == [
        p.ListJobs(job="j-1"),
        p.FollowJob(job="j-1", node_rank=0),
    ]


@pytest.mark.parametrize("found", [[], [("j-1", 1)], [("j-2", 0)]])
def test_a_node_that_is_not_there_is_not_met(stage, found):
    stage.host.listings = tuple(
        listing(job, node_rank, [stage.host]) for job, node_rank in found
    )
    assert stage.outcomes(MEET) == [AttemptFailed(error=None)]
    assert stage.hung_up() == [False, True]


# ---- Collect


def collect(stage: Stage) -> Collect:
    return Collect(node_rank=1, link=stage.link, sizes={1: len(b"result")})


@any_error
def test_results_that_can_not_be_collected_wait_on_their_host(
    stage, monkeypatch, error
):
    monkeypatch.setattr(job_requests, "small_results", broken(error))
    assert stage.outcomes(collect(stage)) == [Collected(results={}, is_kept_idle=False)]


def test_results_of_a_host_that_says_no_more_are_not_waited_for(stage, monkeypatch):
    monkeypatch.setattr(executor, "COLLECT_S", 0.2)
    assert stage.outcomes(collect(stage)) == [Collected(results={}, is_kept_idle=False)]


# ---- Join


def test_a_host_joins_and_is_started_as_the_lead_says(stage):
    (joined,) = stage.outcomes(JOIN, FakeJoiner())
    assert joined == Joined(
        host_index=0, request_id="a1", link=joined.link, node_rank=START.node_rank
    )
    assert stage.host.requests[-1] == START
    assert not stage.host.processes[-1].is_closed.is_set()


@any_error
def test_a_host_that_is_not_admitted_is_hung_up_on(stage, error):
    assert stage.outcomes(JOIN, FakeJoiner(error)) == [
        JoinFailed(host_index=0, error=error, request_id=JOIN.request_id)
    ]
    assert stage.hung_up() == [False, True]


@any_error
def test_a_host_that_can_not_be_reached_does_not_join(stage, monkeypatch, error):
    monkeypatch.setattr(LinkOpener, "link", broken(error))
    assert stage.outcomes(JOIN, FakeJoiner()) == [
        JoinFailed(host_index=0, error=error, request_id=JOIN.request_id)
    ]


@any_error
def test_a_node_that_does_not_start_is_hung_up_on(stage, monkeypatch, error):
    monkeypatch.setattr(Link, "start", broken(error))
    assert stage.outcomes(JOIN, FakeJoiner()) == [
        JoinFailed(
            host_index=0,
            error=error,
            request_id=JOIN.request_id,
            node_rank=START.node_rank,
        )
    ]
    assert stage.host.processes[-1].is_closed.is_set()


def test_a_node_that_joins_a_run_that_is_over_is_stopped(stage):
    executor = stage.executor_with(FakeJoiner())
    executor.close((stage.link,))
    perform(executor, JOIN)
    assert stage.host.requests[-2:] == [START, TOO_LATE]
    assert stage.host.processes[-1].is_closed.is_set()
    assert stage.queue.batch(0) == []


def test_a_node_whose_joining_nobody_has_read_when_the_run_ends_is_stopped(stage):
    executor = stage.executor_with(FakeJoiner())
    perform(executor, JOIN)
    executor.close((stage.link,))
    assert stage.host.requests[-2:] == [START, TOO_LATE]
    assert stage.host.processes[-1].is_closed.is_set()


def test_a_node_that_has_joined_is_hung_up_on_without_a_word(stage):
    executor = stage.executor_with(FakeJoiner())
    perform(executor, JOIN)
    (event,) = stage.queue.batch(0)
    executor.close((stage.link, event.what.link))
    assert stage.host.requests[-1] == START


# ---- Send and Close


def test_a_message_goes_over_every_link_that_works_and_ends_in_no_event(stage):
    other = Stage(FakeHost("gpu-b"))
    stage.host.cut()
    stage.executor.perform(Send(links=(stage.link, other.link), message=p.DetachJob()))
    wait_until(lambda: other.host.requests, "the message to arrive")
    assert other.host.requests == [p.DetachJob()]
    assert stage.queue.batch(0) == []
    other.executor.close((other.link,))


def test_a_link_of_which_nothing_more_is_wanted_is_closed(stage):
    stage.executor.perform(Close(link=stage.link))
    wait_until(lambda: stage.host.is_left, "the link to be closed")
    assert stage.queue.batch(0) == []


# ---- leases, and the end


def renewals(host: FakeHost) -> int:
    return len(host.requests_of(p.RenewLease))


def test_the_lease_is_renewed_over_the_links_of_now_until_the_end(stage):
    since = Since()
    other = Stage(FakeHost("gpu-b"))
    stage.executor.keep_lease_over((stage.link,))
    wait_until(lambda: renewals(stage.host) >= 2, "the lease to be renewed twice")
    assert renewals(other.host) == 0
    stage.executor.keep_lease_over((other.link,))
    assert len(since.threads("distmagic-lease")) == 1
    wait_until(
        lambda: renewals(other.host) >= 2, "the lease to be renewed over the new link"
    )
    before = renewals(stage.host)
    wait_until(
        lambda: renewals(other.host) >= 5, "the lease to be renewed over the new link"
    )
    assert renewals(stage.host) == before
    stage.executor.close((other.link,))
    wait_until(lambda: not since.threads("distmagic-lease"), "the thread to end")
    other.executor.close(())


def test_one_broken_link_does_not_keep_the_lease_from_the_others(stage):
    other = Stage(FakeHost("gpu-b"))
    stage.host.cut()
    stage.executor.keep_lease_over((stage.link, other.link))
    wait_until(lambda: renewals(other.host) >= 3, "the lease to be renewed")
    stage.executor.close((other.link,))
    other.executor.close(())


@pytest.mark.parametrize("kind", ["reconnect", "meet", "join"])
def test_the_end_hangs_up_on_a_link_that_came_and_that_nobody_took(stage, kind):
    """The run was over before the event was read, so no row of its table has the link."""
    action: Action
    if kind == "reconnect":
        action = Reconnect(
            node_rank=1, host_index=0, after=9, broken=stage.link, can_ask=True
        )
    elif kind == "meet":
        stage.host.listings = (listing("j-1", 1, [stage.host]),)
        action = Reconnect(node_rank=1, host_index=0, meets=True)
    else:
        action = Join(host_index=0, request_id="id1", broken=stage.link)
    executor = stage.executor_with(FakeJoiner())
    executor.perform(action)
    found: list[Event] = []

    def has_come() -> bool:
        found.extend(stage.queue.batch(0))
        return bool(found)

    wait_until(has_come, "the link")
    assert isinstance(found[0].what, (Linked, Joined))
    executor.close((stage.link,))
    assert stage.host.is_left
