"""Tests whether hosts can connect to each other, at the addresses and ports of a run.

A "door" is a listening test port.

A door only answers a visitor that sends its secret, with a hash of it. All doors close on request,
with the conversation, and after `LIFE_S` without a visitor. They need no torch and write nothing.

    open     it answered, after more bytes than fit into one packet
    half     it receives small packets, but no large ones
    refused, silent, no route, no name    the kernel's error, or a timeout
    another  another program answered
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import socket
from concurrent.futures import ThreadPoolExecutor

from distmagic.remote.system import threads
from distmagic.remote.system.facts import family_of
from distmagic.remote.wire.parts import HostDoor

LIFE_S = 120.0  # longer than the slowest host takes to answer
_PATIENCE_S = 1.5  # for a connection: one packet of it may be lost
_ANSWER_S = 5.0  # for an answer over a connection: the other end may be busy
_LOAD = bytes(9000)  # more than one packet, even with jumbo frames
_AT_ONCE = 64  # doors that are tested at the same time
_MOST_GUESTS = 1000  # limit of visitors of one door
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


def _word(secret: str, what: str) -> bytes:
    return hashlib.sha256(f"{what} {secret}".encode()).digest()


def _received(sock: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes, or fewer before the end. Raises TimeoutError."""
    data = b""
    while len(data) < size and (more := sock.recv(size - len(data))):
        data += more
    return data


class Doors:
    """Listens on ports of one own address.

    `ports` are those that were available, 0 for the others.
    """

    def __init__(self, address: str, ports: tuple[int, ...], secret: str) -> None:
        self._secret = secret
        self._listeners = []
        taken = []
        family = family_of(address)
        for port in ports:
            try:
                listener = socket.create_server((address, port), family=family)
            except OSError:
                taken.append(0)
                continue
            listener.settimeout(LIFE_S)
            self._listeners.append(listener)
            taken.append(int(listener.getsockname()[1]))
        self.ports = tuple(taken)
        self._threads = [threads.begin("doors", self._open, one) for one in self._listeners]  # fmt: skip

    def close(self) -> None:
        """Close all; returns when nothing listens any more."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # it has closed by itself
                listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _open(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError), listener:
            # Its time is over, or it was closed.
            for _ in range(_MOST_GUESTS):
                guest, _ = listener.accept()
                guest.settimeout(2 * _ANSWER_S)  # the visitor gives up first
                threads.begin("guest", self._answer, guest)

    def _answer(self, guest: socket.socket) -> None:
        key = _word(self._secret, "knock")
        with contextlib.suppress(OSError), guest:
            if hmac.compare_digest(_received(guest, len(key)), key):
                guest.sendall(_word(self._secret, "small"))
                if _received(guest, len(_LOAD)) == _LOAD:
                    guest.sendall(_word(self._secret, "large"))


def knock(doors: tuple[HostDoor, ...]) -> tuple[str, ...]:
    """Return the result for each door."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="distmagic-knock") as pool:
        return tuple(pool.map(_behind, doors))


def _behind(door: HostDoor) -> str:
    small, large = (_word(door.secret, what) for what in ("small", "large"))
    late = "silent"
    try:
        place = (door.address, door.port)
        with socket.create_connection(place, _PATIENCE_S) as sock:
            sock.settimeout(_ANSWER_S)
            sock.sendall(_word(door.secret, "knock"))
            if _received(sock, len(small)) != small:
                return "another"
            late = "half"
            sock.sendall(_LOAD)
            return "open" if _received(sock, len(large)) == large else "another"
    except (socket.gaierror, UnicodeError, OverflowError):
        return "no name"  # as the other host has sent it
    except TimeoutError:
        return late
    except OSError as error:
        return "no route" if error.errno in _NO_ROUTE else "refused"
