"""Dialling the rendezvous: open, refused, silent, and open later. The clock is ours, the sockets are real."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from distmagic.remote.agent.endpoint import Dialer
from distmagic.remote.wire.protocol import Endpoint


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is taken, and where nobody listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def polls(
    dialer: Dialer, until_s: float, start_s: float = 0.0
) -> list[tuple[float, Endpoint]]:
    """Return what is told, and when, by a clock that ticks 20 times a second."""
    ticks = [start_s + i / 20 for i in range(int((until_s - start_s) * 20) + 1)]
    return [(at, found) for at in ticks if (found := dialer.poll(at)) is not None]


@pytest.mark.parametrize(("lead", "state"), [(True, "open"), (False, "reached")])
def test_a_port_that_is_open(lead, state):
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialer = Dialer("127.0.0.1", server.getsockname()[1], lead=lead, now=0.0)
        told = polls(dialer, 3.0)
        assert [event for _, event in told] == [Endpoint(state=state)]
        assert told[0][0] < 1.0
        assert dialer.is_done
        assert dialer.poll(99.0) is None


def test_a_port_that_refuses_is_told_once(port):
    dialer = Dialer("127.0.0.1", port, lead=False, now=0.0)
    told = polls(dialer, 20.0)
    assert [event for _, event in told] == [
        Endpoint(
            state="unreached", detail=f"127.0.0.1 port {port} (Connection refused)"
        )
    ]
    assert 4.0 < told[0][0] < 4.2
    assert not dialer.is_done
    dialer.close()


def test_the_lead_waits_in_silence(port):
    dialer = Dialer("127.0.0.1", port, lead=True, now=0.0)
    assert polls(dialer, 30.0) == []
    dialer.close()


def test_a_port_that_opens_late():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        dialer = Dialer("127.0.0.1", server.getsockname()[1], lead=False, now=0.0)
        assert [event.state for _, event in polls(dialer, 10.0)] == ["unreached"]
        server.listen()
        assert [event.state for _, event in polls(dialer, 15.0, 10.0)] == ["reached"]


def test_a_port_that_does_not_answer():
    """A listener whose queue is full drops what comes, as a firewall does."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        full = [socket.socket() for _ in range(4)]
        for one in full:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        dialer = Dialer("127.0.0.1", port, lead=False, now=0.0)
        told = polls(dialer, 12.0)
        assert [event for _, event in told] == [
            Endpoint(
                state="unreached",
                detail=f"127.0.0.1 port {port} (Connection timed out)",
            )
        ]
        dialer.close()
        for one in full:
            one.close()


def test_a_name_that_nobody_knows():
    dialer = Dialer("no-such-host.invalid", 1, lead=False, now=0.0)
    try:
        told = polls(dialer, 5.0)
    finally:
        dialer.close()
    assert [event.state for _, event in told] == ["unreached"]
    assert "no-such-host.invalid port 1 (" in told[0][1].detail


def test_a_name_is_looked_up_until_it_is_known_and_then_no_more(port, monkeypatch):
    real, asked = socket.getaddrinfo, []

    def getaddrinfo(name, *more):
        asked.append(name)
        if len(asked) == 1:
            raise socket.gaierror(socket.EAI_AGAIN, "not yet")
        return real("127.0.0.1", *more)

    dialer = Dialer("lead", port, lead=False, now=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", getaddrinfo)
        told = polls(dialer, 6.0)
    assert told[0][1].detail == f"lead port {port} (Connection refused)"
    assert asked == ["lead", "lead"]
    dialer.close()


def test_a_host_without_a_free_descriptor_dials_later(port, monkeypatch):
    def no_descriptor(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    dialer = Dialer("127.0.0.1", port, lead=False, now=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", no_descriptor)
        ((_, event),) = polls(dialer, 5.0)
    assert event == Endpoint(
        state="unreached",
        detail=f"127.0.0.1 port {port} ([Errno 24] Too many open files)",
    )
    assert polls(dialer, 6.0, 5.0) == []
    assert not dialer.is_done
    dialer.close()
