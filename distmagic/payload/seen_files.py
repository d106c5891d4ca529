"""Records size and times of files that this process sent or fetched, in order to detect later
edits.

Dates alone are not enough: the clock can be set back, so a later edit may have an earlier date.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from distmagic.remote.records import places
from distmagic.remote.system.processes import up_s

_Look = tuple[int, int, int]
# Each with the time, by `up_s`, since which it was unchanged.
_SEEN: dict[Path, tuple[_Look, float]] = {}


def sent(path: Path, status: os.stat_result) -> None:
    """Record a file that is sent to hosts."""
    before = _SEEN.get(path.absolute())
    if before is None or before[0] != _look(status):
        _SEEN[path.absolute()] = _look(status), up_s()


def fetched(path: Path) -> None:
    """Record a file that a fetch has just written. Raises OSError."""
    _SEEN[path.absolute()] = _look(path.lstat()), -math.inf


def is_edited(path: Path, began_up_s: float) -> bool:
    """Whether a file was changed, other than by a fetch, since a run started, which was at
    `began_up_s` by `up_s`.

    The date only decides for a file that this process has neither sent nor fetched. Raises OSError.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    # Paths of sent files contain no links.
    real = path.parent.resolve() / path.name
    seen = _SEEN.get(path.absolute()) or _SEEN.get(real)
    if seen is not None:
        look, since_up_s = seen
        return look != _look(status) or since_up_s > began_up_s
    # The start by the clock that dates files in that folder: it may be a file server's, or have
    # been set meanwhile.
    began_s = places.now_at(path.parent) - (up_s() - began_up_s)
    return status.st_ctime > began_s


def _look(status: os.stat_result) -> _Look:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size
