"""The socket of the gang channel: datagrams in and out, nothing blocks, and nothing that arrives is believed here."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

_AT_ONCE = 256  # datagrams taken before others have their turn: a flood must not keep the agent from its work
_MAX_BYTES = 256


class Udp:
    """Bound to one address of this host. Raises OSError where that can't be."""

    def __init__(self, address: str, port: int) -> None:
        family, _, _, _, place = resolve(address, port)
        self.socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self.socket.bind(place)
        except BaseException:
            self.socket.close()
            raise
        self.socket.setblocking(False)

    def receive(self) -> Iterator[tuple[bytes, Any]]:
        """Yield (datagram, sender) of those that are there."""
        for _ in range(_AT_ONCE):
            try:
                yield self.socket.recvfrom(_MAX_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue  # an earlier one was refused at its destination, as Linux tells here

    def send(self, outbox: list[tuple[Any, bytes]]) -> None:
        """Send all, and empty the list. One that can't be sent is as good as one that was lost on the way."""
        for address, data in outbox:
            with contextlib.suppress(OSError):
                self.socket.sendto(data, address)
        outbox.clear()


def resolve(address: str, port: int) -> tuple[Any, ...]:
    """Return what `getaddrinfo` says first of an address in numbers. Raises OSError."""
    return socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
