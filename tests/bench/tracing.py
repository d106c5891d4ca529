"""Which thread has a CPU when, from the scheduler's own trace points, and which process started which.

It uses an instance of tracefs of its own, which is removed afterwards: https://docs.kernel.org/trace/ftrace.html. Its
clock is CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_TRACEFS = Path("/sys/kernel/tracing")
_BUFFER_KB = 16384  # of each CPU; a warm cell needs a tenth
_EVENTS = ("sched/sched_switch", "task/task_newtask")
_LINE = re.compile(r"-(\d+)\s+\[(\d+)\] \S+\s+(\d+\.\d+): (\w+): (.*)")
_SWITCH = re.compile(r"prev_pid=(\d+) .*next_pid=(\d+) ")
_NEW_TASK = re.compile(r"pid=(\d+) comm=.* clone_flags=([0-9a-f]+)")
_CLONE_THREAD = 0x10000  # sched.h
OTHERS = "other programs"
_SHADES = " ░▒▓█"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A time in which one thread had a CPU, in seconds of CLOCK_MONOTONIC."""

    tid: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Birth:
    """A new thread, or the first thread of a new process; `parent` is the thread that made it."""

    tid: int
    parent: int
    is_process: bool


@contextlib.contextmanager
def recording(name: str) -> Iterator[Path]:
    """Record inside the block, and yield the file that is read after it, before the outer block ends."""
    if not (_TRACEFS / "instances").exists():
        subprocess.run(["mount", "-t", "tracefs", "none", str(_TRACEFS)], check=True)
    own = _TRACEFS / "instances" / f"{name}-{os.getpid()}"
    own.mkdir()
    try:
        (own / "trace_clock").write_text("mono")
        (own / "buffer_size_kb").write_text(str(_BUFFER_KB))
        for event in _EVENTS:
            (own / "events" / event / "enable").write_text("1")
        yield own / "trace"
    finally:
        own.rmdir()


def read(text: str) -> tuple[list[Turn], list[Birth]]:
    """Return all turns in the order of their ends, and all births in order. Pure."""
    turns: list[Turn] = []
    births: list[Birth] = []
    since: dict[str, tuple[int, float]] = {}  # by CPU: who has it, and since when
    for line in text.splitlines():
        found = _LINE.search(line)
        if found is None:
            continue
        tid, cpu, at, event, rest = found.groups()
        switch, new = _SWITCH.search(rest), _NEW_TASK.match(rest)
        if event == "sched_switch" and switch is not None:
            now_s = float(at)
            who, begin_s = since.get(cpu, (int(switch[1]), now_s))
            if who:  # 0 is the idle task
                turns.append(Turn(tid=who, begin_s=begin_s, end_s=now_s))
            since[cpu] = int(switch[2]), now_s
        elif event == "task_newtask" and new is not None:
            is_process = not int(new[2], 16) & _CLONE_THREAD
            births.append(
                Birth(tid=int(new[1]), parent=int(tid), is_process=is_process)
            )
    return turns, births


def shares(
    turns: list[Turn], owners: Mapping[int, str], begin_s: float, end_s: float
) -> dict[str, float]:
    """Return the seconds from begin to end that each owner has: half where two run at once. "" has those of nobody.

    A thread without an owner counts as "other programs". The sum is `end_s - begin_s`. Pure.
    """
    steps: list[tuple[float, int, str]] = []
    for turn in turns:
        begin, end = max(turn.begin_s, begin_s), min(turn.end_s, end_s)
        if begin < end:
            owner = owners.get(turn.tid, OTHERS)
            steps += [(begin, 1, owner), (end, -1, owner)]
    steps.sort(key=lambda step: step[0])
    found: dict[str, float] = {}
    running: dict[str, int] = {}
    last_s = begin_s
    for at_s, change, owner in [*steps, (end_s, 0, "")]:
        now = [one for one, count in running.items() for _ in range(count)] or [""]
        for one in now:
            found[one] = found.get(one, 0.0) + (at_s - last_s) / len(now)
        last_s = at_s
        if change:
            running[owner] = running.get(owner, 0) + change
    return found


def drawn(
    turns: list[Turn],
    owners: Mapping[int, str],
    rows: list[str],
    begin_s: float,
    end_s: float,
    columns: int,
) -> list[str]:
    """Return one line of shades for each owner in `rows`: a column is full where it had a CPU all the time. Pure."""
    width_s = (end_s - begin_s) / columns
    lines = []
    for row in rows:
        own = [turn for turn in turns if owners.get(turn.tid, OTHERS) == row]
        text = ""
        for column in range(columns):
            left_s = begin_s + column * width_s
            used_s = sum(
                max(0.0, min(t.end_s, left_s + width_s) - max(t.begin_s, left_s))
                for t in own
            )
            full = min(1.0, used_s / width_s)
            text += _SHADES[math.ceil(full * (len(_SHADES) - 1))]
        lines.append(text)
    return lines
