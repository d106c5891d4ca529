"""Doors: who has the secret finds out that a host can be dialled, and nobody else gets a word."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from distmagic.remote.checkup.doors import Doors, knock
from distmagic.remote.wire.protocol import HostDoor
from tests.lab.waiting import HANG_S

HERE, SECRET = "127.0.0.1", "00ff"


@pytest.fixture
def doors() -> Iterator[Doors]:
    with closing(Doors(HERE, (0, 0), SECRET)) as made:
        yield made


def door(port: int, secret: str = SECRET, address: str = HERE) -> HostDoor:
    return HostDoor(address=address, port=port, secret=secret)


def test_all_doors_of_a_host_open_to_many_guests(doors):
    assert len({*doors.ports, 0}) == 3
    asked = tuple(door(port) for port in doors.ports) * 20
    assert knock(asked) == ("open",) * 40


def test_a_door_that_is_closed_refuses(doors):
    ports = doors.ports
    doors.close()
    assert knock(tuple(map(door, ports))) == ("refused", "refused")


def test_a_port_that_something_else_has_is_not_taken():
    with socket.socket() as other:
        other.bind((HERE, 0))
        other.listen()
        with closing(Doors(HERE, (other.getsockname()[1], 0), SECRET)) as doors:
            assert doors.ports[0] == 0
            assert knock((door(doors.ports[1]),)) == ("open",)


def test_an_address_of_another_host_can_not_be_listened_on():
    with closing(Doors("192.0.2.1", (0,), SECRET)) as doors:
        assert doors.ports == (0,)


def test_the_door_of_another_host_is_no_door(doors):
    """Where two hosts have one address, who dials the other one reaches itself."""
    assert knock((door(doors.ports[0], "another"),)) == ("another",)


def test_a_place_that_can_not_be_one_leaves_the_other_doors(doors):
    """Another host has sent it, and may be broken."""
    odd = (door(1, address="a..b"), door(1 << 64))
    assert knock((*odd, door(doors.ports[0]))) == ("no name", "no name", "open")


@pytest.mark.slow
def test_what_is_no_door_at_all():
    with socket.socket() as other:
        other.bind((HERE, 0))
        other.listen()
        other.settimeout(HANG_S)
        # It takes the connection, and never says a word.
        assert knock((door(other.getsockname()[1]),)) == ("silent",)


def test_a_network_that_takes_no_large_packets(doors, monkeypatch):
    """Who knocks gives up before the door hangs up, which would be an answer."""
    monkeypatch.setattr("distmagic.remote.checkup.doors._ANSWER_S", 0.5)
    with socket.socket() as network:
        network.bind((HERE, 0))
        network.listen()

        def hand_on() -> None:
            guest, _ = network.accept()
            with guest, socket.create_connection((HERE, doors.ports[0])) as far:
                far.sendall(guest.recv(32))
                guest.sendall(far.recv(32))
                far.recv(1)  # its end

        thread = threading.Thread(target=hand_on)
        thread.start()
        assert knock((door(network.getsockname()[1]),)) == ("half",)
        thread.join(HANG_S)


def test_a_name_that_leads_nowhere():
    assert knock((door(1, address="nobody.invalid"),)) == ("no name",)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(9100)])
def test_a_stranger_gets_no_word_and_is_in_nobodys_way(doors, said):
    with socket.create_connection((HERE, doors.ports[0]), HANG_S) as stranger:
        stranger.sendall(said)
        assert knock((door(doors.ports[0]),)) == ("open",)
        try:
            stranger.shutdown(socket.SHUT_WR)
            answer = stranger.recv(100)
        except OSError:  # it was hung up on
            answer = b""
        assert answer == b""


def test_doors_close_by_themselves(monkeypatch):
    monkeypatch.setattr("distmagic.remote.checkup.doors.LIFE_S", 0.0)
    doors = Doors(HERE, (0,), SECRET)
    doors._threads[0].join(HANG_S)
    assert knock((door(doors.ports[0]),)) == ("refused",)
    doors.close()
