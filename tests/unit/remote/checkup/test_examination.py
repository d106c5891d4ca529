"""What a host reads about itself for the doctor."""

from __future__ import annotations

import os
import resource
import socket
import threading

import pytest

from distmagic.remote.checkup import examination


def test_a_name_server_that_is_down_takes_a_second_or_two_and_no_more(monkeypatch):
    answered = threading.Event()

    def resolve(*_: object, **__: object) -> list[object]:
        answered.wait()
        return []

    monkeypatch.setattr(examination, "_NAME_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        assert examination.examine(()).name_addresses is None
    finally:
        answered.set()


def test_a_name_without_addresses_is_told_from_one_that_nobody_has_looked_up(
    monkeypatch,
):
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert examination.examine(()).name_addresses == ()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert examination.examine(()).name_addresses is None


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """Play a host with a port of InfiniBand, and the devices of its user."""
    state = tmp_path / "sys" / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("4: ACTIVE\n")
    monkeypatch.setattr(examination, "_PORTS", str(tmp_path / "sys"))
    monkeypatch.setattr(examination, "_VERBS", tmp_path / "dev")
    return tmp_path / "dev"


def test_ports_of_infiniband_count_where_its_devices_can_be_used(cards):
    """A container without the devices sees the ports all the same, and NCCL uses sockets."""
    assert examination.examine(()).infiniband == {}
    cards.mkdir()
    (cards / "uverbs0").touch()
    assert examination.examine(()).infiniband == {"mlx5_0/1": "4: ACTIVE"}


def test_the_limit_of_locked_memory_is_none_for_a_process_that_may_ignore_it(
    monkeypatch,
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    monkeypatch.setattr(examination, "_capabilities", lambda: 0)
    assert examination.examine(()).locked_bytes == 8 << 20
    monkeypatch.setattr(examination, "_capabilities", lambda: 1 << 14 | 1)
    assert examination.examine(()).locked_bytes == -1


def test_capabilities_and_user_of_this_process():
    assert (examination._capabilities() == 0) <= (os.geteuid() != 0)
    assert examination.examine(()).is_root == (os.geteuid() == 0)
