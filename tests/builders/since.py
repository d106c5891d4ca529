"""What this very process has got since a moment. What others of it end or close meanwhile counts for nothing."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


class Since:
    """Children, threads and open files of this process that were not there when this was made, and are there now.

    Earlier tests may leave a child that nobody has waited for, a thread or a descriptor that ends during this one. So a
    test counts neither all there is nor a difference of two numbers.
    """

    def __init__(self) -> None:
        self._children = _children()
        self._threads = set(threading.enumerate())
        self._files = _files()

    def children(self) -> list[int]:
        """Return the pids of those that this process has started, and not waited for."""
        return [pid for pid, _ in sorted(_children() - self._children)]

    def threads(self, *prefixes: str) -> list[threading.Thread]:
        """Return the threads whose name begins with one of these."""
        new = set(threading.enumerate()) - self._threads
        return [one for one in new if one.name.startswith(prefixes)]

    def files(self) -> list[str]:
        """Return what each new descriptor is of: a path, or a socket or pipe with its number."""
        return sorted(target for _, target in _files() - self._files)


def _children() -> set[tuple[int, str]]:
    """Return pids with the time at which each was started: a pid may be given anew."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in (task / "children").read_text().split():
                stat = Path(f"/proc/{pid}/stat").read_text()
                found.add((int(pid), stat.rpartition(")")[2].split()[19]))
    return found


def _files() -> set[tuple[str, str]]:
    """Return descriptors with what each is of: a number may be given anew."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        # The listing itself needs one, and other threads close some.
        with contextlib.suppress(FileNotFoundError):
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found
