"""A node of an exported job follows how the others end, by what all of them leave in torchrun's store."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from distmagic.exports.on_nodes import run_node


class Store(dict):
    """torch's store, in one process; `is_gone` when node 0 has ended."""

    is_gone = False

    def compare_set(self, key: str, expected: str, desired: str) -> None:
        self._ask()
        self.setdefault(key, desired.encode())

    def add(self, key: str, more: int) -> int:
        self._ask()
        self[key] = self.get(key, 0) + more
        return self[key]

    def check(self, keys: list[str]) -> bool:
        self._ask()
        return all(key in self for key in keys)

    def get(self, key: str, *default: Any) -> Any:
        self._ask()
        return super().get(key, *default)

    def _ask(self) -> None:
        if self.is_gone:
            raise RuntimeError("failed to recv, got 0 bytes")


class Torchruns:
    """torchrun's agent, as far as it is used: it looks at its ranks until they have ended in this state."""

    def __init__(self, store: Store | None, number: int, ends: str, looks: int = 1):
        self.group = SimpleNamespace(store=store, group_rank=number, group_world_size=2)
        self.group.spec = SimpleNamespace(max_restarts=0)
        self.states = ["HEALTHY"] * (looks - 1) + [ends]

    def get_worker_group(self) -> SimpleNamespace:
        return self.group

    def _monitor_workers(self, group: Any) -> Any:
        state = self.states.pop(0)
        if state == "raises":
            raise RuntimeError("ranks can't be started")
        return SimpleNamespace(
            state=SimpleNamespace(name=state), is_failed=lambda: state == "FAILED"
        )

    def run(self, role: str) -> Any:
        while True:
            result = self._monitor_workers(self.group)
            if result.state.name == "SUCCEEDED":
                self._exit_barrier()  # type: ignore[attr-defined]
            if result.state.name != "HEALTHY":
                return result


class Node(run_node.NodeOfJob, Torchruns):
    """A node of a job of two."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time, which goes on while a node sleeps, and about a second a look."""
    now = [100.0]

    def monotonic() -> float:
        now[0] += 0.5
        return now[0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(
        run_node, "time", SimpleNamespace(monotonic=monotonic, sleep=sleep)
    )
    return now


@pytest.mark.parametrize("ends", ["FAILED", "raises"])
def test_a_node_that_waits_ends_at_once_when_its_peer_has_failed(clock, ends):
    store = Store()
    if ends == "raises":
        with pytest.raises(RuntimeError):
            Node(store, 1, ends).run("default")
    else:
        assert Node(store, 1, ends).run("default").is_failed()
    began_s = clock[0]
    with pytest.raises(SystemExit) as caught:
        Node(store, 0, "SUCCEEDED").run("default")
    assert str(caught.value) == "Node 1 has failed. The ranks of this one ended well."
    assert clock[0] - began_s < 5


def test_ranks_that_still_run_are_ended_some_seconds_after_a_peer_has_failed(clock):
    store = Store()
    Node(store, 0, "FAILED").run("default")
    began_s = clock[0]
    node = Node(store, 1, "SUCCEEDED", looks=1_000)
    with pytest.raises(SystemExit) as caught:
        node.run("default")
    assert str(caught.value) == "Node 0 has failed. This node ends its ranks."
    assert 5 <= clock[0] - began_s < 10
    # Both have failed: the first one counts.
    assert store.get(run_node._OVER) == b"Node 0 has failed."


def test_ranks_that_fail_meanwhile_fail_by_themselves(clock):
    store = Store()
    Node(store, 0, "FAILED").run("default")
    assert Node(store, 1, "FAILED", looks=3).run("default").is_failed()


def test_nodes_that_end_well_wait_for_each_other_and_for_no_longer(clock, monkeypatch):
    store = Store()
    first, last = Node(store, 0, "SUCCEEDED"), Node(store, 1, "SUCCEEDED")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:  # the other one's ranks have ended
            assert not last.run("default").is_failed()

    monkeypatch.setattr(run_node.time, "sleep", sleep)
    assert not first.run("default").is_failed()
    assert len(slept) == 3


@pytest.mark.parametrize("looks", [1, 1_000], ids=["has ended", "runs"])
def test_a_node_whose_peer_is_silent_takes_it_for_lost(clock, looks):
    store, began_s = Store(), clock[0]
    silent = Node(store, 1, "HEALTHY")
    silent._monitor_workers(silent.group)
    with pytest.raises(SystemExit) as caught:
        Node(store, 0, "SUCCEEDED", looks).run("default")
    assert str(caught.value).startswith("Node 1 has been silent for 30 s. ")
    assert 30 <= clock[0] - began_s < 45


def test_a_job_that_may_start_its_ranks_again_waits_for_a_silent_node(clock):
    node = Node(Store(), 0, "FAILED", looks=1_000)
    node.group.spec.max_restarts = 1
    assert node.run("default").is_failed()


def test_a_node_that_lives_is_waited_for(clock, monkeypatch):
    store = Store()
    slow = Node(store, 1, "SUCCEEDED", looks=1_001)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        slept.append(seconds)
        if len(slept) < 1_000:
            slow._monitor_workers(slow.group)
        else:
            slow._exit_barrier()

    monkeypatch.setattr(run_node.time, "sleep", sleep)
    assert not Node(store, 0, "SUCCEEDED").run("default").is_failed()
    assert len(slept) == 1_000


@pytest.mark.parametrize("ends", ["SUCCEEDED", "FAILED"])
def test_a_node_whose_store_is_gone_ends_as_its_ranks_have(clock, ends):
    store = Store()
    store.is_gone = True
    result = Node(store, 1, ends, looks=3).run("default")
    assert result.is_failed() == (ends == "FAILED")


def test_ranks_that_still_run_are_ended_where_the_store_is_gone(clock, golden):
    store = Store()
    store.is_gone = True
    with golden.raises(SystemExit):
        Node(store, 1, "FAILED", looks=1_000).run("default")


def test_a_connection_fails_some_time_after_its_other_end_is_silent():
    ours, other = socket.socketpair()
    with socket.socket() as one, ours, other:
        run_node._bound_waits()
        limit_ms = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit_ms == 30_000


def test_nodes_that_have_not_met_leave_no_word():
    with pytest.raises(RuntimeError, match="can't be started"):
        Node(None, 1, "raises").run("default")
