"""Where node 0 is dialled. Slurm's names of nodes need not be names of hosts: then Slurm is asked for the address."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess

from distmagic.inside.job_node import JobNode

_ASK_S = 10.0


def address_of_lead(place: JobNode) -> str:
    """Return the name or address to dial; a name that does not resolve yet is returned as it is, for it may do so late."""
    if not place.key.startswith("slurm "):
        return place.lead
    with contextlib.suppress(OSError):
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
    """Return the address in what `scontrol show node` says, "" if there is none. Pure."""
    found = re.search(r"(?:^|\s)NodeAddr=(\S+)", said)
    return found[1] if found else ""
