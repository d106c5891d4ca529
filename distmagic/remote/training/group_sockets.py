"""Finds TCP connections of this process and shuts them down, in order to break a call that waits
for other ranks.

No signal interrupts a call of gloo. If another thread shuts down the connections of its group, the
call fails at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

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


def shut(sockets: Sockets, store_port: int = 0) -> None:
    """Shut down those of these TCP connections that still exist.

    Listening sockets and connections accepted at `store_port` are left open: gloo ends the process
    without its listener, and other ranks need the store.
    """
    there = current()
    for fd, target in sockets.items():
        if there.get(fd) != target:
            continue
        try:
            # A separate descriptor: another thread may close the original, and a new file get its
            # number.
            with socket.socket(fileno=os.dup(fd)) as ours:
                if os.readlink(f"{_FOLDER}/{ours.fileno()}") != target:
                    continue
                if ours.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if ours.getpeername() and ours.getsockname()[1] != store_port:
                    ours.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # it listens, or is closed
