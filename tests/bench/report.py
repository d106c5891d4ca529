"""Section report: what progress costs a rank, and how fast its output travels."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import distmagic
from distmagic.request.access import Access
from tests.bench import loops
from tests.bench.bench import REPOSITORY, Bench
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import kept_in, scratch
from tests.bench.screens import Silent
from tests.lab import Lab

TITLE = "Progress and output"
_WAYS = {
    "paced": "tqdm, an iteration at 1,000 a second",
    "iterated": "tqdm, an iteration of `for x in tqdm(...)`",
    "updated": "tqdm, an iteration with `bar.update(1)`",
    "postfix": "tqdm, an iteration with `bar.set_postfix(...)`",
}
_LINES, _EVENTS = 500_000, 200_000


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Measure in real ranks: on this machine, and what has to travel from a host of the lab."""
    with scratch("report") as folder, kept_in(folder / "home"), Lab(1) as lab:
        return (
            *_reports(bench, folder),
            *_bars(bench, folder),
            *_travel(bench, lab, folder),
        )


def _reports(bench: Bench, folder: Path) -> tuple[MetricRow, ...]:
    bench.say("report: report() at 1,000 a second")
    found = distmagic.run(
        loops.reports, bench.rounds, 1500, screen=Silent(), nproc_per_node=1
    ).results[0]
    ours, nothing = found["report"], found["nothing"]
    tqdm = _on_terminal(folder, f"loops.updates({bench.rounds}, 1500)")
    return (
        MetricRow(
            what="report() at 1,000/s, of the training loop", unit="%", ours=tuple(ours["percent"]),
            against="an empty function with the same arguments", theirs=tuple(nothing["percent"]),
            target=Target(limit=0.5, of="ours"),
        ),
        MetricRow(
            what="report() at 1,000/s, a call", unit="us", ours=tuple(ours["us"]),
            against="`bar.update(1)` of plain tqdm, in the same loop", theirs=tuple(tqdm["us"]),
            target=Target(limit=1.0),
        ),
        MetricRow(
            what="... the least that keeps every number, a call", unit="us", ours=tuple(found["least"]["us"]),
            against="`bar.update(1)` of plain tqdm, in the same loop", theirs=tuple(tqdm["us"]),
            note="a tuple a call, and ten times a second JSON over a socket to another process",
        ),
        MetricRow(what="... its CPU, reading the clock included", unit="us", ours=tuple(ours["cpu_us"])),
    )  # fmt: skip


def _bars(bench: Bench, folder: Path) -> Iterator[MetricRow]:
    ours: dict[str, list[float]] = {way: [] for way in _WAYS}
    theirs: dict[str, list[float]] = {way: [] for way in _WAYS}
    for number in range(bench.rounds_dear):
        bench.say(f"report: tqdm captured and on a terminal, round {number + 1}")
        for found, into in (
            (_captured(), ours),
            (_on_terminal(folder, "loops.bars(3)"), theirs),
        ):
            for way in _WAYS:
                into[way] += found[way]
    for way, what in _WAYS.items():
        yield MetricRow(
            what=what, unit="us", ours=tuple(ours[way]), against="plain tqdm to a terminal",
            theirs=tuple(theirs[way]), target=Target(limit=1.0),
        )  # fmt: skip


def _captured() -> dict[str, list[float]]:
    found: dict[str, list[float]] = distmagic.run(
        loops.bars, 3, screen=Silent(), nproc_per_node=1
    ).results[0]
    return found


def _on_terminal(folder: Path, call: str) -> dict[str, list[float]]:
    """Call a function of loops.py in a plain Python on a pseudo-terminal, whose other end is read."""
    result = folder / "bars.json"
    program = f"import json; from tests.bench import loops; json.dump({call}, open({str(result)!r}, 'w'))"
    ours, terminal = pty.openpty()
    # tqdm draws nothing on one of no size.
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
    reader = threading.Thread(target=_drain, args=(ours,))
    reader.start()
    try:
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=REPOSITORY,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            check=True,
        )
    finally:
        os.close(terminal)
        reader.join()
        os.close(ours)
    found: dict[str, list[float]] = json.loads(result.read_text())
    return found


def _drain(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while os.read(descriptor, 65536):
            continue


# ---- what has to travel


def _travel(bench: Bench, lab: Lab, folder: Path) -> Iterator[MetricRow]:
    ours: list[float] = []
    theirs: list[float] = []
    costs: list[float] = []
    _on_host(lab, loops.output, 0)  # the first run is not like the others
    for number in range(bench.rounds_dear):
        bench.say(f"report: {_LINES:,} lines of 2 ranks, round {number + 1}")
        empty_s, _ = _timed(lambda: _on_host(lab, loops.output, 0))
        took_s, run = _timed(lambda: _on_host(lab, loops.output, _LINES // 2))
        assert all(
            run.logs(rank, "stdout").count("\n") == _LINES // 2 for rank in (0, 1)
        ), "lines are missing"
        ours.append(max(1e-3, took_s - empty_s))
        costs += run.results.values()
        nothing_s, _ = _timed(lambda: _by_ssh(lab, 0))
        theirs.append(
            max(1e-3, _timed(lambda: _by_ssh(lab, _LINES // 2))[0] - nothing_s)
        )
    yield MetricRow(
        what=f"{_LINES:,} lines of output of 2 ranks, to the end of the run", unit="s", ours=tuple(ours),
        against="2 x ssh host python into a pipe", theirs=tuple(theirs),
        note=f"{_LINES / sorted(ours)[len(ours) // 2]:,.0f} lines a second; every line is in the host's log, the notebook "
        "is shown what fits; a run without output, and a Python that prints nothing, are taken off",
    )  # fmt: skip
    yield MetricRow(
        what="print() of one line in a rank meanwhile", unit="us", ours=tuple(costs)
    )
    bench.say(f"report: {_EVENTS:,} reports of 2 ranks")
    calls = [
        cost
        for _ in range(bench.rounds_dear)
        for cost in _on_host(lab, loops.events, _EVENTS // 2).results.values()
    ]
    yield MetricRow(
        what="report() as fast as it goes, a call",
        unit="us",
        ours=tuple(calls),
        note=f"{1e6 / sorted(calls)[len(calls) // 2]:,.0f} reports a second a rank, 2 ranks at the same time",
    )


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    value = act()
    return time.monotonic() - began, value


def _on_host(lab: Lab, fn: Callable[[int], float], count: int) -> distmagic.Run:
    access = Access(ssh_config=str(lab.ssh_config))
    return distmagic.run(
        fn, count, hosts=f"{lab.hosts[0].name}:2", access=access, screen=Silent()
    )


def _by_ssh(lab: Lab, count: int) -> None:
    program = f"'import sys; sys.path.insert(0, \"{REPOSITORY}\"); from tests.bench import loops; loops.output({count})'"
    argv = [
        "ssh",
        "-F",
        str(lab.ssh_config),
        lab.hosts[0].name,
        "python3",
        "-u",
        "-c",
        program,
    ]
    clients = [
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    readers = [threading.Thread(target=client.communicate) for client in clients]
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join()
    assert not any(client.returncode for client in clients)
