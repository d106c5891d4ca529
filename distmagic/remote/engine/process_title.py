"""What others see of a process in /proc: its job's mark, and its role on the command line, written over in place.

A forked process shows the variables and the command line with which its ancestor was started. The template is
started with room in both for what its children have to show.
"""

from __future__ import annotations

import ctypes
import os

from distmagic.remote.system import processes

ROOM = "-" * 64  # for a job's name
ROLE = "template"  # no role has a longer name
_ARGUMENTS, _VARIABLES = (45, 46), (47, 48)  # words of /proc/PID/stat after the name: where they begin and end


def show(role: str, job: str) -> None:
    """Show this role and this job from now on. Raises ValueError where there is no room: no template's child."""
    _write(_VARIABLES, f"{processes.MARK}=".encode(), job.encode(), len(ROOM))
    _write(_ARGUMENTS, b"", role.encode(), len(ROLE))


def _write(words: tuple[int, int], before: bytes, text: bytes, room: int) -> None:
    """Write `text` behind `before`, or at the very end where that is empty, and zeros in the rest of its room."""
    if len(text) > room:
        raise ValueError(f"{text[:100]!r} is too long")
    with open("/proc/self/stat", "rb") as file:
        numbers = file.read().rpartition(b")")[2].split()
    begin, end = (int(numbers[word]) for word in words)
    found = ctypes.string_at(begin, end - begin)
    place = found.rindex(before) + len(before) if before else len(found) - room - 1
    ctypes.memmove(begin + place, text.ljust(room, b"\0"), room)


def can_show() -> bool:
    """Whether this process was started with the room."""
    with open("/proc/self/environ", "rb") as file:
        variables = file.read()
    with open("/proc/self/cmdline", "rb") as file:
        arguments = file.read()
    return (
        f"{processes.MARK}={ROOM}\0".encode() in variables
        and arguments.endswith(f"\0{ROLE}\0".encode())
        and (os.path.exists("/proc/self/stat"))
    )
