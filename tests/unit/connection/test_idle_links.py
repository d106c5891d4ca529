"""Conversations between runs: one a host is kept, renews its host's lease, and says goodbye."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from distmagic.connection import idle_links
from distmagic.connection.idle_links import IdleLinks
from distmagic.errors import ConnectionLost
from distmagic.remote.wire import protocol
from distmagic.request.hosts import Host
from tests.builders.since import Since
from tests.lab.waiting import wait_until

WARM = protocol.TemplateRequest(
    owner="ab12", idle_s=900.0, lease_s=0.08, env={}, defaults={}
)


class FakeLink:
    """A conversation that notes what was said; it breaks after `good_for` messages."""

    def __init__(
        self, kept: protocol.TemplateRequest | None = WARM, good_for: int = 1000
    ) -> None:
        self.kept, self.good_for, self.host = (
            kept,
            good_for,
            Host(name="gpu-a" if good_for else "gpu-b"),
        )
        self.said: list[Any] = []
        self.ends: list[str] = []
        self.before_finish: Callable[[], object] = lambda: None
        self.waits: list[float] = []

    def send(self, message: Any) -> None:
        if len(self.said) >= self.good_for:
            raise ConnectionLost("gpu-a: the connection ended.")
        self.said.append(message)

    def end_requests(self) -> None:
        self.said.append("end of requests")

    def finish(self, timeout_s: float = 5.0) -> None:
        self.before_finish()
        self.waits.append(timeout_s)
        self.ends.append("finish")

    def close(self) -> None:
        self.ends.append("close")


@pytest.fixture
def resting():
    since = Since()
    made = IdleLinks()
    yield made
    made.close()
    wait_until(lambda: not since.threads("distmagic-warm"), "no thread")


def test_what_was_given_is_taken_once(resting):
    link: Any = FakeLink()
    resting.give("gpu-a", link)
    assert resting.take("gpu-b") is None
    assert resting.take("gpu-a") is link
    assert resting.take("gpu-a") is None
    assert link.ends == []


def test_one_too_many_and_one_without_anything_loaded_are_ended(resting):
    first, second, cold = FakeLink(), FakeLink(), FakeLink(kept=None)
    for key, link in (("gpu-a", first), ("gpu-a", second), ("gpu-b", cold)):
        resting.give(key, link)
    assert (first.ends, second.ends, cold.ends) == ([], ["finish"], ["finish"])
    assert resting.take("gpu-b") is None


def test_leases_are_renewed_while_conversations_rest(resting):
    first, second = FakeLink(), FakeLink()
    resting.give("gpu-a", first)
    resting.give("gpu-b", second)
    wait_until(lambda: min(len(first.said), len(second.said)) >= 3, "three renewals")
    assert {type(message) for message in first.said} == {protocol.RenewLease}
    assert resting.take("gpu-a") is first
    said = len(first.said)
    more = len(second.said)
    wait_until(lambda: len(second.said) > more + 2, "more renewals of the other")
    assert len(first.said) <= said + 1  # the one that was under way


def test_a_broken_conversation_is_forgotten_and_others_go_on(resting):
    broken, good = FakeLink(good_for=1), FakeLink()
    resting.give("gpu-a", broken)
    resting.give("gpu-b", good)
    wait_until(lambda: broken.ends == ["close"], "the end of the broken one")
    assert resting.take("gpu-a") is None
    said = len(good.said)
    wait_until(lambda: len(good.said) > said, "a renewal")


def test_closing_says_goodbye_to_all_and_it_can_begin_again(resting):
    link, broken = FakeLink(), FakeLink(good_for=0)
    resting.give("gpu-a", link)
    resting.give("gpu-b", broken)
    assert resting.close() == {"gpu-a"}
    assert link.said[-2:] == [protocol.EndTemplates(owner="ab12"), "end of requests"]
    assert link.ends == ["finish"]
    assert broken.ends[-1] in ("finish", "close")
    again = FakeLink()
    resting.give("gpu-a", again)
    wait_until(lambda: len(again.said) > 1, "renewals")


def test_hosts_that_are_frozen_hold_up_the_end_of_a_kernel_together_and_not_in_turn(
    resting, monkeypatch
):
    clock_s = [100.0]
    monkeypatch.setattr(
        idle_links, "time", SimpleNamespace(monotonic=lambda: clock_s[0])
    )
    frozen: list[Any] = [FakeLink() for _ in range(3)]

    def wait() -> None:
        assert [link.said[-1] for link in frozen] == ["end of requests"] * 3, (
            "all were told before any is waited for"
        )
        clock_s[0] += 4.0

    for number, link in enumerate(frozen):
        link.before_finish = wait
        resting.give(number, link)
    resting.close()
    assert [link.waits for link in frozen] == [[5.0], [1.0], [0.0]]


def test_a_forked_child_leaves_the_conversations_to_its_parent(resting, monkeypatch):
    link: Any = FakeLink()
    resting.give("gpu-a", link)
    with monkeypatch.context() as in_the_child:
        in_the_child.setattr(os, "getpid", lambda: -1)
        assert resting.close() == set()
    assert link.ends == []
    assert protocol.EndTemplates(owner="ab12") not in link.said
    assert resting.take("gpu-a") is link
