"""The address of node 0.

Slurm's node names may not be host names; then the address is queried from Slurm.
"""

from __future__ import annotations

import re
import socket
import subprocess
from contextlib import suppress

from distmagic.inside.job_node import JobNode

_ASK_S = 10.0


def address_of_lead(place: JobNode) -> str:
    """Return the name or address of node 0; an unresolvable name is returned too, as it may resolve
    later.
    """
    if not place.key.startswith("slurm "):
        return place.lead
    with suppress(OSError):
        socket.getaddrinfo(place.lead, None)
        return place.lead
    try:
        done = subprocess.run(
            ("scontrol", "--oneliner", "show", "node", place.lead),
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return place.lead
    return address_in(done.stdout) or place.lead


def address_in(said: str) -> str:
    """Return the address in output of `scontrol show node`, "" if there is none. Pure."""
    found = re.search(r"(?:^|\s)NodeAddr=(\S+)", said)
    return found[1] if found else ""
