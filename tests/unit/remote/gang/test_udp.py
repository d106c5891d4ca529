"""The socket of the heartbeats gets its port where others have it for a moment, or are about to have it."""

from __future__ import annotations

import errno
import socket

import pytest

from distmagic.remote.gang import udp
from distmagic.remote.gang.udp import Udp

HERE = "127.0.0.1"


@pytest.fixture
def taken():
    """A socket that has a port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.bind((HERE, 0))
        yield found


def test_a_port_that_is_taken_for_a_moment_is_waited_for(monkeypatch, taken):
    port = taken.getsockname()[1]
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            taken.close()

    monkeypatch.setattr(udp.time, "sleep", pause)
    bound = Udp(HERE, port).socket
    with bound:
        assert bound.getsockname() == (HERE, port)
    assert len(pauses) == 3


def test_a_port_that_stays_taken_is_an_error_after_a_second(monkeypatch, taken):
    pauses: list[float] = []
    monkeypatch.setattr(udp.time, "sleep", pauses.append)
    with pytest.raises(OSError, match="in use") as caught:
        Udp(HERE, taken.getsockname()[1])
    assert caught.value.errno == errno.EADDRINUSE
    assert 0.5 < sum(pauses) < 2


def test_another_error_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(udp.time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(OSError, match="assign"):
        Udp("192.0.2.1", 0)  # no address of this machine


def test_any_port_is_another_one_than_the_leads(monkeypatch):
    """Agents of one machine: a member has bound its port before the lead binds the one that was chosen for it."""
    bound = udp._bound
    with bound(HERE, 0) as chosen:
        reserved = chosen.getsockname()[1]
    kernel_gives = [reserved, 0]
    monkeypatch.setattr(
        udp, "_bound", lambda address, _: bound(address, kernel_gives.pop(0))
    )
    with Udp(HERE, 0, reserved).socket as member, bound(HERE, reserved) as lead:
        assert member.getsockname()[1] != lead.getsockname()[1] == reserved
    assert kernel_gives == []
