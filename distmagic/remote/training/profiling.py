"""Profiles a running rank: torch.profiler over its next steps.

    a contact  --ask-->             the file `profile` next to the agent's sockets: a name, and the
                                    number of steps
    a rank     --Profiling.look-->  after each step of an optimizer; writes its trace to the folder
                                    of its logs
    a contact  --found-->           the existing traces, and the number of ranks without one

A rank that can't be profiled writes a file with the reason instead of its trace.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from distmagic.remote.records.atomic_file import atomic_write

_REST_S = 0.05  # a look costs 2 us, as much as the smallest step


class Profiling:
    """The profiler of a rank. `look` is called after each optimizer step."""

    def __init__(self, run_dir: Path, folder: Path, rank: int) -> None:
        self._place = str(_question(run_dir))
        self._folder, self._rank = folder, rank
        self._seen_ns = 0
        self._profile = ""
        self._steps_left = 0
        self._profiler: Any = None

    def look(self) -> float:
        """Start a requested profile, or continue it; a step without one only checks a file's
        date. Return for how many seconds no further look is needed.
        """
        if self._profiler is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._end()
            return 0.0
        with suppress(OSError):  # nobody has asked
            changed_ns = os.stat(self._place).st_mtime_ns
            if changed_ns != self._seen_ns:
                self._seen_ns = changed_ns
                self._begin()
                return 0.0
        return _REST_S

    def _begin(self) -> None:
        torch = sys.modules["torch"]
        try:
            self._profile, steps = Path(self._place).read_text("ascii").split()
            self._steps_left = int(steps)
            # CUDA and other devices are profiled if they exist.
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        except Exception as error:  # noqa: BLE001 - of torch, or of a profiler that the user has begun
            self._profiler = None
            self._leave(error)

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        place = self._folder / self._name
        aside = place.with_name(f".{self._name}")  # its extension selects compression
        try:
            profiler.stop()
            profiler.export_chrome_trace(str(aside))
            aside.replace(place)
        except Exception as error:  # noqa: BLE001 - training goes on
            self._leave(error)

    def _leave(self, error: Exception) -> None:
        text = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})
        try:
            with atomic_write(self._folder / self._name) as file:
                file.write(gzip.compress(text.encode()))
        except OSError:
            return  # the disk is full: nothing is reported

    @property
    def _name(self) -> str:
        return f"rank{self._rank}.{os.getpid()}.{self._profile}.json.gz"


def _question(run_dir: Path) -> Path:
    return run_dir / "profile"


def ask(run_dir: Path, profile: str, steps: int) -> None:
    """Ask the ranks of a node for a profile, once. Raises OSError if none runs, and ValueError."""
    if not (profile.isalnum() and steps > 0):
        raise ValueError(f"{profile[:80]!r} is no profile")
    place = _question(run_dir)
    text = f"{profile} {steps}".encode()
    if not place.exists() or place.read_bytes() != text:
        with atomic_write(place) as file:
            file.write(text)


def found(run_dir: Path, folder: Path, profile: str) -> tuple[tuple[str, ...], int]:
    """Return the names of a profile's traces in a node's folder, and the number of live ranks
    without one.
    """
    names = sorted(path.name for path in folder.glob(f"rank*.{profile}.json.gz"))
    have = {name.split(".")[1] for name in names}
    pids = [path.name.partition("-")[2] for path in run_dir.glob("stacks-*")]
    waiting = [pid for pid in pids if Path("/proc", pid).exists() and pid not in have]
    return tuple(names), len(waiting)
