"""Section stay: ranks that stay on 2 hosts. An interrupt at a step, a broken group, large values, 1,000 empty cells.

And what it costs a rank to count its steps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.bench.bench import REPOSITORY, Bench
from tests.bench.contestants import Place, magic_line
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import scratch
from tests.bench.kernels import CellFailed, Kernel
from tests.lab import Lab, held, wait_until

TITLE = "Ranks that stay: 2 hosts x 2 ranks over SSH, the large value on 2 x 4"
_INTERRUPTS, _DEADLOCKS = 100, 5
_CELLS, _SETTLED = 1000, 100
_LARGE_BYTES = 1_000_000_000
_MODEL = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
steps = 0
"""
# A rank writes the file in its third step.
_LOOP = """
for step in range(10**9):
    optimizer.zero_grad()
    ddp(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    steps += 1
    if step == 2 and dist.get_rank() == 3:
        open({begun!r}, "w").close()
"""
_ARE_IN_STEP = """
totals = [None] * dist.get_world_size()
dist.all_gather_object(totals, steps)
len(set(totals)) == 1
"""
_DEADLOCK = """
if dist.get_rank() == 3:
    open({begun!r}, "w").close()
if dist.get_rank() != 1:
    dist.all_reduce(torch.ones(1))
else:
    dist.recv(torch.ones(1), src=2)
"""
# The smallest step that there is, without what a rank calls after each step, and with it.
_STEPS = """
import json, pathlib, sys, timeit
import torch
from distmagic.remote.training import profiling, steps
torch.set_num_threads(1)
weight = torch.nn.Parameter(torch.zeros(4))
weight.grad = torch.ones(4)
step = torch.optim.SGD([weight], lr=0.1).step
took_us = lambda: min(timeit.repeat(step, number=500, repeat=20)) / 500 * 1e6
took_us()
without = took_us()
folder = pathlib.Path(sys.argv[1])
steps.install(profiling.Profiling(folder, folder, 0).look)
print(json.dumps([took_us(), without]))
"""


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Measure all of it in one kernel, the large value in another."""
    with scratch("stay") as folder, Lab(2) as lab:
        place = Place(lab=lab, folder=folder)
        with Kernel(sys.executable, folder, place.env) as kernel:
            line = magic_line(place).replace("%%distributed", "%%ranks")
            kernel.run("%load_ext distmagic")
            kernel.run(f"{line}\n{_MODEL}")
            rows = [
                *_interrupted(bench, kernel, folder),
                *_empty_cells(bench, kernel, lab),
            ]
            kernel.run("%distributed end ranks")
            kernel.run("%distributed down")
        return (*rows, *_large(bench, place), _steps(bench, folder))


def _interrupted(bench: Bench, kernel: Kernel, folder: Path) -> Iterator[MetricRow]:
    seconds, out_of_step = [], 0
    for number in range(_INTERRUPTS):
        seconds.append(_stop(kernel, _LOOP, folder / f"begun-{number}"))
        out_of_step += "True" not in kernel.run(f"%%ranks\n{_ARE_IN_STEP}").shown
    bench.say(f"stay: {_INTERRUPTS} interrupts, {out_of_step} out of step")
    yield MetricRow(
        what="an interrupt of a DDP loop on ranks that stay, to the prompt", unit="s", ours=tuple(seconds),
        target=Target(limit=0.2, of="ours"),
    )  # fmt: skip
    yield MetricRow(
        what=f"ranks out of step after it, of {_INTERRUPTS} times", unit="", ours=(out_of_step,),
        target=Target(limit=0, of="ours"),
    )  # fmt: skip
    seconds = []
    for number in range(_DEADLOCKS):
        seconds.append(_stop(kernel, _DEADLOCK, folder / f"deadlock-{number}"))
        kernel.run("%%ranks\ndist.barrier()\nddp = DistributedDataParallel(ddp.module)")
        bench.say(f"stay: a deadlock is over after {seconds[-1]:.2f} s")
    yield MetricRow(
        what="an interrupt of a deadlock of 4 ranks, to the prompt", unit="s", ours=tuple(seconds),
        target=Target(limit=4, of="ours"),
    )  # fmt: skip


def _stop(kernel: Kernel, cell: str, begun: Path) -> float:
    """Run a cell on the ranks, interrupt it when it has begun, and return the seconds from then to the prompt."""

    def interrupt() -> float:
        wait_until(begun.exists, "a rank to begin")
        os.kill(kernel.pid, signal.SIGINT)
        return time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        interrupted = pool.submit(interrupt)
        try:
            kernel.run(f"%%ranks\n{cell.format(begun=str(begun))}")
        except CellFailed:
            return time.monotonic() - interrupted.result()
    raise AssertionError("the cell came to its end")


def _empty_cells(bench: Bench, kernel: Kernel, lab: Lab) -> Iterator[MetricRow]:
    looks = []
    for number in range(1, _CELLS + 1):
        kernel.run("%%ranks\npass")
        if number in (_SETTLED, _CELLS):
            pids = [
                process.outer_pid
                for host in lab.hosts
                for process in host.processes()
                if process.is_of_distmagic
            ]
            looks.append(
                (
                    held.memory_mb(kernel.pid),
                    sum(map(held.memory_mb, pids)),
                    sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
                    sum(_journal_bytes(host.home) for host in lab.hosts) / 1e3,
                )
            )
            bench.say(f"stay: {number} empty cells: {looks[-1]}")
    grown = [after - before for before, after in zip(*looks, strict=True)]
    after = f"growth from cell {_SETTLED} to {_CELLS:,} of ranks that stay"
    whats = (
        ("kernel's memory", "MB", 10),
        ("the hosts' memory", "MB", 10),
        ("the hosts' descriptors", "", 0),
    )
    for (what, unit, limit), growth in zip(whats, grown[:3], strict=True):
        yield MetricRow(
            what=f"{what}, {after}", unit=unit, ours=(growth,), target=Target(limit=limit, of="ours")
        )  # fmt: skip
    each = grown[3] / (_CELLS - _SETTLED) / len(lab.hosts)
    yield MetricRow(what="journal, an empty cell and host", unit="kB", ours=(each,))


def _journal_bytes(home: Path) -> int:
    jobs = home / ".distmagic" / "jobs"
    return sum(file.stat().st_size for file in jobs.rglob("*.jsonl"))


def _large(bench: Bench, place: Place) -> Iterator[MetricRow]:
    """Give 8 ranks a value of 1 GB, which leaves the notebook once."""
    with Kernel(sys.executable, place.folder, place.env) as kernel:
        line = magic_line(place).replace("%%distributed", "%%ranks").replace(":2", ":4")
        kernel.run("%load_ext distmagic")
        kernel.run(f"{line}\nimport torch")
        kernel.run(
            f"import torch\nlarge = torch.ones({_LARGE_BYTES // 4})\nlarge[0] = 2"
        )
        before = place.lab.sent_bytes()
        took_s = kernel.run("ranks['x'] = large").took_s
        gigabytes = (place.lab.sent_bytes() - before) / 1e9
        shown = kernel.run("%%ranks\nfloat(x[0]), len(x)").shown
        assert f"(2.0, {_LARGE_BYTES // 4})" in shown, shown
        bench.say(f"stay: 1 GB: {took_s:.1f} s, {gigabytes:.2f} GB out of the notebook")
        kernel.run("%distributed end ranks")
        kernel.run("%distributed down")
    place.lab.assert_clean(within_s=30)
    what = "ranks['x'] = 1 GB, on 8 ranks of 2 hosts"
    yield MetricRow(what=what, unit="s", ours=(took_s,))
    yield MetricRow(
        what="... bytes out of the notebook", unit="GB", ours=(gigabytes,), target=Target(limit=1.1, of="ours")
    )  # fmt: skip


def _steps(bench: Bench, folder: Path) -> MetricRow:
    command = [sys.executable, "-c", _STEPS, str(folder)]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    found = []
    for _ in range(bench.rounds):
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
        found.append(json.loads(done.stdout))
    bench.say(f"stay: the smallest step, counted and not counted: {found[-1]} us")
    return MetricRow(
        what="the smallest SGD step of a rank, counted", unit="us", ours=tuple(ours for ours, _ in found),
        against="not counted", theirs=tuple(theirs for _, theirs in found), target=Target(limit=1.1),
    )  # fmt: skip
