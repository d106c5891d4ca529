"""Whether hosts can dial each other: doors that other hosts knock on for a moment, at the addresses and ports of a run.

A door opens only to its own secret, answers with a hash of that, and has no other use. All doors close when they are asked
to, with the conversation, and after `LIFE_S`. No torch is needed, and nothing is written.

    open     its answer came, after more bytes than fit into one packet
    half     it takes a small packet, and no large one
    refused, silent, no route, no name    as the kernel says it, or does not
    another  something answered that is not this door
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import selectors
import socket
import time
from dataclasses import dataclass, field

from distmagic.remote.system import threads
from distmagic.remote.wire import protocol

LIFE_S = 15.0
_PATIENCE_S = 1.5  # for a connection: one packet of it may be lost
_ANSWER_S = 5.0  # for an answer over a connection: the other end may be busy
_WAVE_S = 0.2  # until the next wave begins, whether the one before is through or not
_LOAD = bytes(9000)  # more than one packet, also of jumbo frames
_MOST_GUESTS = 1000
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _word(secret: str, what: str) -> bytes:
    return hashlib.sha256(f"{what} {secret}".encode()).digest()


class Doors:
    """Listens on ports of one own address. `ports` are those that it could take, 0 for any other."""

    def __init__(self, address: str, ports: tuple[int, ...], secret: str) -> None:
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._mine, self._others = socket.socketpair()
        self._selector.register(self._mine, selectors.EVENT_READ)
        self._closes_at = time.monotonic() + LIFE_S
        taken = []
        for port in ports:
            listener = socket.socket(_family(address))
            try:
                listener.bind((address, port))
                listener.listen(128)
            except OSError:
                listener.close()
                taken.append(0)
                continue
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, b"")
            taken.append(int(listener.getsockname()[1]))
        self.ports = tuple(taken)
        self._thread = threads.begin("doors", self._serve)

    def close(self) -> None:
        """Close all; nothing listens any more when this returns."""
        self._others.close()
        self._thread.join()

    def _serve(self) -> None:
        guests: dict[socket.socket, bytearray] = {}
        listeners = [
            key.fileobj
            for key in self._selector.get_map().values()
            if key.data is not None
        ]
        try:
            while (left_s := self._closes_at - time.monotonic()) > 0:
                for key, _ in self._selector.select(left_s):
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj is self._mine:
                        return
                    if key.fileobj in listeners:
                        self._let_in(key.fileobj, guests)
                    elif not self._hear(key.fileobj, guests[key.fileobj]):
                        self._selector.unregister(key.fileobj)
                        guests.pop(key.fileobj)
                        key.fileobj.close()
        finally:
            for key in tuple(self._selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
            self._selector.close()

    def _let_in(
        self, listener: socket.socket, guests: dict[socket.socket, bytearray]
    ) -> None:
        with contextlib.suppress(OSError):
            guest, _ = listener.accept()
            if len(guests) >= _MOST_GUESTS:
                guest.close()
                return
            guest.setblocking(False)
            guests[guest] = bytearray()
            self._selector.register(guest, selectors.EVENT_READ, b"")

    def _hear(self, guest: socket.socket, said: bytearray) -> bool:
        """Take what a guest says, and answer what is right; return whether it may say more."""
        key = _word(self._secret, "knock")
        try:
            data = guest.recv(len(key) + len(_LOAD))
            before = len(said)
            said += data
            if not data or not hmac.compare_digest(said[: len(key)], key[: len(said)]):
                return False
            if before < len(key) <= len(said):
                guest.send(_word(self._secret, "small"))
            if len(said) >= len(key) + len(_LOAD):
                guest.send(_word(self._secret, "large"))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


@dataclass
class _Knocking:
    """One door that is being tried."""

    door: protocol.HostDoor
    ends_at: float
    sock: socket.socket | None = None
    heard: bytearray = field(default_factory=bytearray)
    answer: str = ""


def knock(doors: tuple[protocol.HostDoor, ...]) -> tuple[str, ...]:
    """Return what is behind each door. They are tried in waves of 1, 2, 4 ..., so that few packets fly at the same time."""
    waiting = [_Knocking(door=door, ends_at=0.0) for door in doors]
    all_of_them = tuple(waiting)
    selector = selectors.DefaultSelector()
    size, next_at = 1, 0.0
    while waiting or selector.get_map():
        now = time.monotonic()
        if waiting and (now >= next_at or not selector.get_map()):
            for one in waiting[:size]:
                _begin(one, selector)
            del waiting[:size]
            size, next_at = 2 * size, now + _WAVE_S
        for key, _ in selector.select(_WAVE_S / 4):
            _go_on(key.data, selector)
        now = time.monotonic()
        for key in tuple(selector.get_map().values()):
            if now >= key.data.ends_at:
                _end(key.data, selector, "half" if key.data.heard else "silent")
    selector.close()
    return tuple(one.answer for one in all_of_them)


def _begin(one: _Knocking, selector: selectors.BaseSelector) -> None:
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            one.door.address, one.door.port, type=socket.SOCK_STREAM
        )[0]
    except OSError:
        one.answer = "no name"
        return
    one.sock = socket.socket(family, kind, number)
    one.sock.setblocking(False)
    one.ends_at = time.monotonic() + _PATIENCE_S
    selector.register(one.sock, selectors.EVENT_WRITE, one)
    code = one.sock.connect_ex(address)
    if code not in (0, errno.EINPROGRESS):
        _end(one, selector, _meaning(code))


def _go_on(one: _Knocking, selector: selectors.BaseSelector) -> None:
    assert one.sock is not None
    secret = one.door.secret
    try:
        if selector.get_key(one.sock).events == selectors.EVENT_WRITE:
            code = one.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                _end(one, selector, _meaning(code))
                return
            one.sock.send(_word(secret, "knock"))
            one.ends_at = time.monotonic() + _ANSWER_S
            selector.modify(one.sock, selectors.EVENT_READ, one)
            return
        data = one.sock.recv(4096)
        if not one.heard and data:
            one.sock.send(_LOAD)
            one.ends_at = time.monotonic() + _PATIENCE_S
        one.heard += data
    except OSError as error:
        _end(one, selector, _meaning(error.errno or 0))
        return
    wanted = _word(secret, "small") + _word(secret, "large")
    if one.heard == wanted:
        _end(one, selector, "open")
    elif not data or not wanted.startswith(one.heard):
        _end(one, selector, "another")


def _meaning(code: int) -> str:
    if code == errno.ETIMEDOUT:
        return "silent"
    if code in _NO_ROUTE:
        return "no route"
    return "refused"


def _end(one: _Knocking, selector: selectors.BaseSelector, answer: str) -> None:
    assert one.sock is not None
    selector.unregister(one.sock)
    one.sock.close()
    one.answer = answer
