"""Overwrites the job's mark and the role of a forked process in /proc.

/proc shows the variables and the command line of the exec'ed ancestor, not the current ones. So the
template is started with placeholders in both, as long as the longest text of its children.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from distmagic.remote.system import processes

JOB_PLACEHOLDER = "-" * 64  # the value of the job's mark in the template's environment
ROLE_PLACEHOLDER = "template"  # the template's last argument; no role has a longer name
# Positions of arguments and variables in memory: fields of /proc/PID/stat, counted from the one
# after the name.
_ARGUMENTS, _VARIABLES = (45, 46), (47, 48)


def show(role: str, job: str) -> None:
    """Overwrite this process's arguments and environment, so that /proc shows the role and the job.

    Raises ValueError for texts that are too long, and in a process that no template forked.
    """
    _write(
        _VARIABLES, f"{processes.MARK}=".encode(), job.encode(), len(JOB_PLACEHOLDER)
    )
    _write(_ARGUMENTS, b"", role.encode(), len(ROLE_PLACEHOLDER))


def _write(words: tuple[int, int], before: bytes, text: bytes, room: int) -> None:
    """Overwrite `room` bytes with `text` and zeros: those after the last `before`, or the very last
    if it is empty.
    """
    if len(text) > room:
        raise ValueError(f"{text[:100]!r} is too long")
    begin, end = _limits(words)
    found = ctypes.string_at(begin, end - begin)
    if before:
        place = found.rindex(before) + len(before)
    else:
        place = len(found) - room - 1  # 1: the zero at the end
    ctypes.memmove(begin + place, text.ljust(room, b"\0"), room)


def _limits(words: tuple[int, int]) -> tuple[int, int]:
    """Return the addresses in memory that are in these two fields: the first byte, and the end."""
    _, _, rest = Path("/proc/self/stat").read_bytes().rpartition(b")")
    numbers = rest.split()
    return int(numbers[words[0]]), int(numbers[words[1]])


def can_show() -> bool:
    """Whether this process was started with both placeholders, and /proc has their addresses in
    memory.
    """
    variables = Path("/proc/self/environ").read_bytes()
    arguments = Path("/proc/self/cmdline").read_bytes()
    has_job = f"{processes.MARK}={JOB_PLACEHOLDER}\0".encode() in variables
    has_role = arguments.endswith(f"\0{ROLE_PLACEHOLDER}\0".encode())
    # gVisor has 0 for the positions in memory.
    return has_job and has_role and min(*_limits(_VARIABLES), *_limits(_ARGUMENTS)) > 0
