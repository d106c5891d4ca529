"""The UDP socket of the heartbeats.

It never blocks, and it checks nothing: `datagrams.unseal` does.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

# Datagrams read in one turn of the agent's loop: a flood must not delay its other work.
_AT_ONCE = 256
_MAX_BYTES = 256
_TRIES, _PAUSE_S = 20, 0.05


class Udp:
    """A socket bound to one address of this host. Raises OSError if it can't be bound.

    `port` 0 is any port but `reserved`, which the lead's agent may be about to bind on this
    machine.
    """

    def __init__(self, address: str, port: int, reserved: int = 0) -> None:
        self.socket = _bound(address, port)
        if port == 0 and self.socket.getsockname()[1] == reserved:
            wrong, self.socket = self.socket, _bound(address, 0)
            wrong.close()
        self.socket.setblocking(False)

    def receive(self) -> Iterator[tuple[bytes, Any]]:
        """Yield (bytes, sender's address) of the received datagrams, at most 256."""
        for _ in range(_AT_ONCE):
            try:
                yield self.socket.recvfrom(_MAX_BYTES)
            except BlockingIOError:
                return
            except OSError:
                # Linux reports at this point that an earlier datagram was refused at its
                # destination.
                continue

    def send(self, outbox: list[tuple[Any, bytes]]) -> None:
        """Send all (address, bytes) and empty the list.

        A datagram that can't be sent counts as lost.
        """
        for address, data in outbox:
            with suppress(OSError):
                self.socket.sendto(data, address)
        outbox.clear()


def _bound(address: str, port: int) -> socket.socket:
    """Return a socket that is bound. A taken port is tried for a second.

    It was free when it was chosen: who has it now, such as a look-up of a name, soon ends.
    """
    family, _, _, _, place = resolve(address, port)
    for left in reversed(range(_TRIES)):
        bound = socket.socket(family, socket.SOCK_DGRAM)
        try:
            bound.bind(place)
        except OSError as error:
            bound.close()
            if error.errno != errno.EADDRINUSE or not left:
                raise
            time.sleep(_PAUSE_S)
        else:
            break
    return bound


def resolve(address: str, port: int) -> tuple[Any, ...]:
    """Return the first result of `getaddrinfo` for a numeric address, without name lookup.

    Raises OSError.
    """
    return socket.getaddrinfo(
        address, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
    )[0]
