"""A memory cgroup in which a whole host of the lab lives, so that its kernel kills for want of memory in earnest."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from tests.lab.host import LabHost
from tests.lab.waiting import wait_until

_ROOT = Path("/sys/fs/cgroup")


def reason_without() -> str:
    """Return why there can be no such cgroup on this machine, "" if there can."""
    folder = _folder()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return "this machine lets nobody make a memory cgroup"
    if (
        _is_second()
        and "memory" not in (folder / "cgroup.subtree_control").read_text().split()
    ):
        return "this machine's root cgroup hands on no memory controller"
    return ""


def _is_second() -> bool:
    return not (_ROOT / "memory").is_dir()


def _folder() -> Path:
    return _ROOT if _is_second() else _ROOT / "memory"


class MemoryLimit:
    """A cgroup of a host's SSH server and all that it starts. Without a limit until `set`; gone after `remove`."""

    def __init__(self, host: LabHost) -> None:
        self._path = _folder() / f"distmagic-test-{secrets.token_hex(4)}"
        self._path.mkdir()
        for pid in host.outer_pids():
            self._take(self._path, pid)

    def _take(self, folder: Path, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended since it was seen
            (folder / "cgroup.procs").write_text(str(pid))

    def set(self, more_bytes: int) -> None:
        """Let what is in it have so much more memory than it has now."""
        used, limit = (
            ("current", "max") if _is_second() else ("usage_in_bytes", "limit_in_bytes")
        )
        size = int((self._path / f"memory.{used}").read_text()) + more_bytes
        (self._path / f"memory.{limit}").write_text(str(size))

    def remove(self) -> None:
        """Let what is still in it go, and remove it."""
        for line in (self._path / "cgroup.procs").read_text().split():
            self._take(_folder(), int(line))
        wait_until(self._is_removed, "an empty cgroup to go")

    def _is_removed(self) -> bool:
        try:
            self._path.rmdir()
        except OSError:  # a process is about to end
            return False
        return True
