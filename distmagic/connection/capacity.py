"""The limit of open files of this process, raised before so many hosts are reached.

In the middle of a launch the same shortage would be a socket that can't be made.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from distmagic.errors import UsageError

# Open files of a connection, measured while it is made, and rounded up.
BY_PARAMIKO = 2
BY_SSH_PROGRAM = 11  # one program keeps the connection, one is the conversation
_SPARE = 64  # for whatever else the notebook opens meanwhile


def check(hosts: int, *, by_ssh_program: bool) -> None:
    """Raise the soft limit of open files to what connections to so many hosts more take.

    Raises `UsageError` where the hard limit is too low for them.
    """
    if hosts <= 0:
        return
    each = BY_SSH_PROGRAM if by_ssh_program else BY_PARAMIKO
    needed = len(os.listdir("/dev/fd")) + _SPARE + hosts * each
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    higher = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    # Some systems have a lower limit than they report.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (higher, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        raise UsageError(
            f"{hosts:,} hosts at once take {needed:,} open files of this process, and {soft:,} are allowed (ulimit -n).",
            f"Run `ulimit -n {needed}` in the shell that starts this notebook (an administrator may have to allow it), "
            "or name fewer hosts.",
        )
