"""Host keys that are trusted on first use, and stored in a separate file: from then on no other key
is accepted.

This is for newly created hosts, whose keys can't be known before. The file is a known_hosts file.
Its caller chooses a new one for hosts that may have new keys, such as the next launch of a cluster.
"""

from __future__ import annotations

import base64
import fcntl
import os

from distmagic.transports import troubles
from distmagic.transports.ssh import known_hosts
from distmagic.transports.ssh.config import Resolved


def check(server: Resolved, where: str, key_type: str, blob: bytes) -> None:
    """Return if the file has this key for `server`, or has none yet: then the key is added to it.

    Raises `Trouble` for another key, and if the file can't be written. The file is locked
    meanwhile. Of two kernels that connect for the first time at once, the second one checks the key
    that the first one saw.
    """
    path, name = server.user_known_hosts[0], known_hosts.names_of(server)[0]
    try:
        number = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600
        )
        with open(number, "r+", encoding="utf-8", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            keys = [key for key in known_hosts.parse(file, path) if key.is_for(name)]
            if not keys:
                encoded = base64.b64encode(blob).decode()
                file.write(f"{name} {key_type} {encoded}\n")
    except OSError as error:
        why = error.strerror or str(error)
        raise troubles.UNKEPT_HOST_KEY(where, why, path) from error
    if keys and all(key.blob != blob for key in keys):
        shown = known_hosts.shown(key_type, blob)
        raise troubles.OTHER_HOST_KEY(where, key=shown, file=path)
