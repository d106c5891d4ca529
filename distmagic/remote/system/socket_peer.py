"""Who is at the other end of a unix socket: the kernel tells, nobody can pretend."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("=iII")  # struct ucred of unix(7): pid, uid, gid


def is_ours(conn: socket.socket) -> bool:
    """Whether the process that connected (or, on its side, the one that listened) belongs to this very user."""
    try:
        found = conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return False
    _, uid, _ = _CREDENTIALS.unpack(found)
    return bool(uid == os.getuid())


def check(conn: socket.socket) -> None:
    """Raise PermissionError unless `is_ours`."""
    if not is_ours(conn):
        raise PermissionError("the process at the other end of a socket of distmagic is not this user's")
