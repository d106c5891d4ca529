"""Connections of this process over TCP, which are shut down to break a call that waits for other ranks.

gloo leaves a call for no signal. Where another thread shuts the connections of its group, the call fails at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

# The descriptor of a socket, and its number in the kernel: descriptors are used again.
Sockets = Mapping[int, str]

_FOLDER = "/proc/self/fd"


def current() -> Sockets:
    """Return the sockets that this process has now."""
    found = {}
    for fd in os.listdir(_FOLDER):
        # The listing's own descriptor, and what another thread closes.
        with contextlib.suppress(OSError):
            target = os.readlink(f"{_FOLDER}/{fd}")
            if target.startswith("socket:"):
                found[int(fd)] = target
    return found


def shut(sockets: Sockets, store_port: int = 0) -> None:
    """Shut down the connections over TCP among these that are still there.

    What listens is left alone, and what has been accepted at `store_port`: gloo ends the process without its listener,
    and other ranks need the store.
    """
    there = current()
    for fd, target in sockets.items():
        if there.get(fd) != target:
            continue
        try:
            # A descriptor of our own: another thread may close that one, and a new file get its number.
            with socket.socket(fileno=os.dup(fd)) as ours:
                if os.readlink(f"{_FOLDER}/{ours.fileno()}") != target:
                    continue
                if ours.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if ours.getpeername() and ours.getsockname()[1] != store_port:
                    ours.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # it listens, or is closed
