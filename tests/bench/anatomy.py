"""Section anatomy: who has each millisecond of a warm cell on 2 hosts x 2 ranks, by the scheduler's own record.

All hosts of the lab are on one machine, so one clock and one record show kernel, wire and hosts together.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from tests.bench import contestants, tracing
from tests.bench.bench import FOLDER, Bench
from tests.bench.contestants import Place
from tests.bench.figures import MetricRow
from tests.bench.folders import scratch
from tests.bench.tracing import Birth, Turn
from tests.lab import Lab

TITLE = "Anatomy of a warm cell: 2 hosts x 2 ranks over SSH"
PICTURE = FOLDER / "anatomy.txt"
NOBODY = "nobody: all wait"
# From the cell to the ranks and back.
OWNERS = (
    "kernel: the cell",
    "kernel: connections",
    "kernel: the view",
    "kernel: its client",
    "sshd",
    "contact",
    "template",
    "agent",
    "torchrun",
    "ranks",
    tracing.OTHERS,
    NOBODY,
)
# A process that is forked from one of these is the next.
_NEXT = {
    "template": "agent",
    "agent": "torchrun",
    "torchrun": "ranks",
    "ranks": "ranks",
}
_COLUMNS = 64
# In the kernel: the name of each thread, by its ID, and when its view was drawn. A new thread's first call takes the
# note.
_NOTE = """
import json, pkgutil, sys, threading, time
import distmagic.screens
_names = {t.native_id: t.name for t in threading.enumerate()}
_drawn = []

def _note_thread(*_):
    sys.setprofile(None)
    _names[threading.get_native_id()] = threading.current_thread().name

def _timed(draw):
    def timed(*args, **kwargs):
        began_s = time.monotonic()
        try:
            return draw(*args, **kwargs)
        finally:
            _drawn.append((began_s, time.monotonic()))
    return timed

threading.setprofile(_note_thread)
for _module in pkgutil.iter_modules(distmagic.screens.__path__, "distmagic.screens."):
    for _class in list(vars(pkgutil.resolve_name(_module.name)).values()):
        if isinstance(_class, type) and _class.__module__ == _module.name:
            for _name in {"show", "finish"} & vars(_class).keys():
                setattr(_class, _name, _timed(vars(_class)[_name]))
"""
_VIEW = -1  # stands for the cell's thread while it draws


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Record one warm cell a round, and draw the one whose length is the median."""
    rounds: list[tuple[float, dict[str, float], str]] = []
    with (
        scratch("anatomy") as folder,
        Lab(2) as lab,
        tracing.recording("anatomy") as trace,
    ):
        place = Place(lab=lab, folder=folder)
        with contestants.own_kernel(place) as (kernel, run):
            kernel.run(_NOTE)
            for number in range(bench.rounds + 2):
                before = _roles(kernel.pid)
                trace.write_text("")
                began_s = time.monotonic()
                took = run()
                ended_s = time.monotonic()
                turns, births = tracing.read(trace.read_text())
                notes = folder / "notes"
                kernel.run(
                    f"open({str(notes)!r}, 'w').write(json.dumps([_names, _drawn]))"
                )
                names, drawn = json.loads(notes.read_text())
                threads = {int(tid): _thread(name) for tid, name in names.items()}
                owners = grown({**before, **threads, _VIEW: "kernel: the view"}, births)
                turns = [
                    part for turn in turns for part in parts(turn, kernel.pid, drawn)
                ]
                if number > 1:  # caches are warm
                    found = tracing.shares(turns, owners, began_s, ended_s)
                    drawing = _picture(turns, owners, began_s, ended_s, took.first_s)
                    rounds.append((ended_s - began_s, found, drawing))
                    bench.say(f"anatomy: {1000 * (ended_s - began_s):.0f} ms")
    middle = sorted(rounds, key=lambda one: one[0])[len(rounds) // 2]
    PICTURE.write_text(middle[2])
    print(middle[2])
    return tuple(
        MetricRow(
            what=f"warm cell, {owner}",
            unit="ms",
            ours=tuple(1000 * found.get("" if owner == NOBODY else owner, 0.0) for _, found, _ in rounds),
        )
        for owner in OWNERS
    )  # fmt: skip


def _roles(kernel: int) -> dict[int, str]:
    """Return the owner of each thread that runs now and is of the kernel or of a host."""
    parents: dict[int, int] = {}
    found: dict[int, tuple[int, str]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            stat = (process / "stat").read_text()
            argv = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            threads = [int(task.name) for task in (process / "task").iterdir()]
        except OSError:  # it has ended
            continue
        pid = int(process.name)
        parents[pid] = int(stat.rpartition(")")[2].split()[1])
        if pid == kernel:
            owner = "kernel: its client"
        elif argv[0].startswith(b"sshd") or argv[0].endswith(b"sshd"):
            owner = "sshd"
        elif argv[-1] == b"template":
            owner = "template"
        elif any(b"distmagic-python" in word for word in argv):
            owner = "contact"
        else:
            continue
        found.update(dict.fromkeys(threads, (pid, owner)))
    return {tid: owner for tid, (pid, owner) in found.items() if _is_ours(pid, parents)}


def _is_ours(pid: int, parents: dict[int, int]) -> bool:
    """Whether a process descends from this one."""
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()


def _thread(name: str) -> str:
    """Return the owner of a kernel's thread of this name."""
    if name == "MainThread":
        return "kernel: the cell"
    is_of_jupyter = name.startswith(("IO", "Heartbeat", "Control", "Shell"))
    return "kernel: its client" if is_of_jupyter else "kernel: connections"


def parts(turn: Turn, tid: int, drawn: Iterable[tuple[float, float]]) -> list[Turn]:
    """Return a turn in parts: those of thread `tid` in which the view was drawn are the view's. Pure."""
    if turn.tid != tid:
        return [turn]
    found, at_s = [], turn.begin_s
    for began_s, ended_s in sorted(drawn):
        begin_s, end_s = max(began_s, at_s), min(ended_s, turn.end_s)
        if begin_s < end_s:
            found.append(Turn(tid=tid, begin_s=at_s, end_s=begin_s))
            found.append(Turn(tid=_VIEW, begin_s=begin_s, end_s=end_s))
            at_s = end_s
    return [*found, Turn(tid=tid, begin_s=at_s, end_s=turn.end_s)]


def grown(owners: dict[int, str], births: Iterable[Birth]) -> dict[int, str]:
    """Return the owners with those of new threads and processes: a fork of the template is an agent, and so on. Pure."""
    roles = dict(owners)
    for birth in births:
        of_parent = roles.get(birth.parent)
        if of_parent is not None and birth.tid not in owners:
            roles[birth.tid] = (
                _NEXT.get(of_parent, of_parent) if birth.is_process else of_parent
            )
    return roles


def _picture(
    turns: list[Turn],
    owners: dict[int, str],
    begin_s: float,
    end_s: float,
    first_s: float,
) -> str:
    found = tracing.shares(turns, owners, begin_s, end_s)
    whole_ms = 1000 * (end_s - begin_s)
    rows = [one for one in OWNERS if one != NOBODY]
    lines = tracing.drawn(turns, owners, rows, begin_s, end_s, _COLUMNS)
    text = [f"{'':20} {'ms':>5}  0 {f'{whole_ms:.0f} ms':>{_COLUMNS - 2}}"]
    for row, line in zip(rows, lines, strict=True):
        text.append(f"{row:20} {1000 * found.get(row, 0.0):5.0f}  {line}".rstrip())
    text.append(f"{NOBODY:20} {1000 * found.get('', 0.0):5.0f}")
    mark = int(first_s * 1000 / whole_ms * _COLUMNS)
    text.append(f"{'':28}{' ' * mark}^ first line of the last rank")
    return "\n".join(text) + "\n"
