"""The cgroups of a host on which systemd runs: whether there can be any, and how they go."""

from __future__ import annotations

import os
from pathlib import Path

_ALL = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))


def _root() -> Path:
    return next((path for path in _ALL if (path / "cgroup.procs").exists()), _ALL[-1])


def reason_without() -> str:
    """Return why there can be no such host on this machine, "" if there can."""
    root = _root()
    if not (root / "cgroup.controllers").exists() or not os.access(root, os.W_OK):
        return "this machine lets nobody make a cgroup (version 2), which systemd needs"
    return ""


def remove(name: str) -> bool:
    """Remove a cgroup and all in it; return whether it is gone: its processes may not have ended quite yet."""
    top = _root() / name
    for folder, _, _ in os.walk(top, topdown=False):
        try:
            Path(folder).rmdir()
        except OSError:
            return False
    return not top.exists()
