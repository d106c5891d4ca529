"""Host keys that are trusted when they are first seen, and kept in a file of ours: no other key counts from then on.

For hosts that were made a moment ago and whose keys nobody can know beforehand. The file is a known_hosts file; whoever
names it chooses a new one for what may have new keys, such as the next launch of a cluster.
"""

from __future__ import annotations

import base64
import fcntl
import os

from distmagic.transports import troubles
from distmagic.transports.ssh import known_hosts


def check(server: known_hosts.Dialled, key_type: str, blob: bytes) -> None:
    """Return if `server` may show this key: the one that `server.file` has for it, or any where it has none yet.

    That one is written there. Raises `Trouble` for another key, and where the file can't be written. The file is locked
    meanwhile: of two kernels that connect for the first time at once the second one checks what the first one saw.
    """
    name = server.names[0]
    try:
        number = os.open(
            server.file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600
        )
        with open(number, "r+", encoding="utf-8", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            keys = [
                key for key in known_hosts.parse(file, server.file) if key.is_for(name)
            ]
            if not keys:
                encoded = base64.b64encode(blob).decode()
                file.write(f"{name} {key_type} {encoded}\n")
    except OSError as error:
        raise troubles.UNKEPT_HOST_KEY(
            server.where, error.strerror or str(error), server.file
        ) from error
    if keys and all(key.blob != blob for key in keys):
        shown = known_hosts.shown(key_type, blob)
        raise troubles.OTHER_HOST_KEY(server.where, key=shown, file=server.file)
