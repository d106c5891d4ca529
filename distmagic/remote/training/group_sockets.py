"""Finds TCP connections of this process, measures what they transfer, and shuts them down, in order
to break a call that waits for other ranks.

No signal interrupts a call of gloo. If another thread shuts down the connections of its group, the
call fails at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Mapping

# The descriptor of a socket and its inode number, because descriptors are reused.
Sockets = Mapping[int, str]

_FOLDER = "/proc/self/fd"


def current() -> Sockets:
    """Return the current sockets of this process."""
    found = {}
    for fd in os.listdir(_FOLDER):
        # The listing's own descriptor, or one that another thread closes.
        with contextlib.suppress(OSError):
            target = os.readlink(f"{_FOLDER}/{fd}")
            if target.startswith("socket:"):
                found[int(fd)] = target
    return found


def moved_bytes(sockets: Sockets) -> int:
    """Return how many bytes these TCP connections have received, and have sent with an
    acknowledgement; 0 where the kernel does not count them.
    """
    total = 0
    for ours in _opened(sockets):
        # `struct tcp_info` of Linux: bytes_acked and bytes_received.
        with contextlib.suppress(OSError, struct.error):
            info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            total += sum(struct.unpack_from("QQ", info, 120))
    return total


def shut(sockets: Sockets, store_port: int = 0) -> None:
    """Shut down those of these TCP connections that still exist.

    Listening sockets and connections accepted at `store_port` are left open: gloo ends the process
    without its listener, and other ranks need the store.
    """
    for ours in _opened(sockets):
        with contextlib.suppress(OSError):  # it listens, or is closed
            if ours.getpeername() and ours.getsockname()[1] != store_port:
                ours.shutdown(socket.SHUT_RDWR)


def _opened(sockets: Sockets) -> Iterator[socket.socket]:
    """Yield those of these TCP sockets that still exist, each until the next one."""
    there = current()
    for fd, target in sockets.items():
        if there.get(fd) != target:
            continue
        # A separate descriptor: another thread may close the original, and a new file get its
        # number.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:
            is_same = os.readlink(f"{_FOLDER}/{ours.fileno()}") == target
            if is_same and ours.family in (socket.AF_INET, socket.AF_INET6):
                yield ours
