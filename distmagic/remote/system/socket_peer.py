"""The user at the other end of a unix socket. The kernel provides it, so it can't be forged."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("=iII")  # struct ucred of unix(7): pid, uid, gid


def is_ours(conn: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user: the one that connected, or the one
    that listened.
    """
    try:
        found = conn.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
    except OSError:
        return False
    _, uid, _ = _CREDENTIALS.unpack(found)
    return bool(uid == os.getuid())


def check(conn: socket.socket) -> None:
    """Raise PermissionError unless the process at the other end belongs to this user."""
    if not is_ours(conn):
        raise PermissionError(
            "the process at the other end of a socket of distmagic is not this user's"
        )
