"""How files of this machine looked when this process sent or fetched them: what looks otherwise was edited since.

Dates alone don't say that: the clock that gives them can be set, and what was edited later then has the earlier date.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from distmagic.remote.system.processes import up_s

_Look = tuple[int, int, int]
# Each with the moment, by `up_s`, from which on it has looked so.
_SEEN: dict[Path, tuple[_Look, float]] = {}


def sent(path: Path, status: os.stat_result) -> None:
    """Note how a file looks that hosts are sent."""
    before = _SEEN.get(path.absolute())
    if before is None or before[0] != _look(status):
        _SEEN[path.absolute()] = _look(status), up_s()


def fetched(path: Path) -> None:
    """Note how a file looks that a fetch has written just now. Raises OSError."""
    _SEEN[path.absolute()] = _look(path.lstat()), -math.inf


def is_edited(path: Path, began_unix_s: float, began_up_s: float) -> bool:
    """Whether somebody else than a fetch has changed a file since a run began, by the time of day and by `up_s`.

    The date decides only of a file that this process has neither sent nor fetched. Raises OSError.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    # What is sent has no link in its path.
    real = path.parent.resolve() / path.name
    seen = _SEEN.get(path.absolute()) or _SEEN.get(real)
    if seen is not None:
        look, since_up_s = seen
        return look != _look(status) or since_up_s > began_up_s
    # By a clock that was set since, the run began at another time of day.
    began_by_now_s = time.time() - (up_s() - began_up_s)
    return status.st_ctime > min(began_unix_s, began_by_now_s)


def _look(status: os.stat_result) -> _Look:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size
