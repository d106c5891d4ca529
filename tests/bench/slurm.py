"""Section slurm: the job of work.py on 2 nodes x 2 ranks of real Slurm, through a log-in node over SSH.

Ours is a cell with `--on slurm:LOGIN`; by hand it is `ssh LOGIN srun torchrun`. Each is measured in a new allocation and
in one that is held.
"""

from __future__ import annotations

import contextlib
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from tests.bench import contestants
from tests.bench.bench import Bench
from tests.bench.contestants import Place, Took
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import scratch
from tests.bench.kernels import Kernel
from tests.bench.work import SOURCE
from tests.lab import wait_until
from tests.lab.slurm import SlurmLab
from tests.system.components import reason_without

TITLE = "Slurm: 2 nodes x 2 ranks, through a log-in node over SSH"
NEW, HELD = "first cell, in a new allocation", "second cell, in the held allocation"
_TARGETS = {NEW: None, HELD: Target(limit=0.05)}
_FLAGS = "--nodes 2 --nproc-per-node 2 --slurm cpus-per-task=4"
_RESOURCES = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4")


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Run ours and by hand once a round, each in a new allocation and in a held one."""
    if reason := reason_without("slurm"):
        return _rows({}, {}, f"not measured: {reason}")
    ours: dict[str, list[Took]] = {NEW: [], HELD: []}
    theirs: dict[str, list[Took]] = {NEW: [], HELD: []}
    with scratch("slurm") as folder, SlurmLab(2) as slurm:
        place = Place(lab=slurm.lab, folder=folder)
        (folder / "script.py").write_text(f"{SOURCE}\nimport sys\nwork(sys.argv[1])\n")
        for number in range(bench.rounds_dear + 1):
            took_theirs = {NEW: _by_hand(place, slurm, ())}
            with _held(slurm) as job:
                took_theirs[HELD] = _by_hand(
                    place, slurm, (f"--jobid={job}", "--overlap")
                )
            with _kernel(place, slurm) as (kernel, run):
                took_ours = {NEW: run()}
                kernel.run(contestants.READING)
                took_ours[HELD] = run()
            for what in (NEW, HELD):
                bench.say(
                    f"slurm: {what}: {took_ours[what].end_s:.2f} s, by hand {took_theirs[what].end_s:.2f} s"
                )
                if number:  # the first round only warms the caches
                    ours[what].append(took_ours[what])
                    theirs[what].append(took_theirs[what])
    return _rows(ours, theirs, "")


def _by_hand(place: Place, slurm: SlurmLab, step: tuple[str, ...]) -> Took:
    """Run `ssh LOGIN srun torchrun`, with a script that lies on the nodes already."""
    stamps, port = place.stamps(), random.randint(20000, 30000)
    torchrun = (
        f"exec python3 -m torch.distributed.run --nnodes=2 --node-rank=$SLURM_NODEID --nproc-per-node=2 "
        f"--master-addr={slurm.nodes[0].address} --master-port={port} {place.folder / 'script.py'} {stamps.folder}"
    )
    srun = shlex.join(["srun", *step, *_RESOURCES, "sh", "-c", torchrun])
    ssh = ["ssh", "-F", str(slurm.lab.ssh_config), slurm.login.name, srun]
    began_at, began = time.time(), time.monotonic()
    done = subprocess.run(
        ssh, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    end_s = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    return Took(first_s=stamps.last_at() - began_at, end_s=end_s)


@contextlib.contextmanager
def _held(slurm: SlurmLab) -> Iterator[str]:
    """Hold an allocation as a user would, and yield its number."""
    sleep = ("--output=/dev/null", "--wrap", "exec sleep 600")
    job = slurm.command("sbatch", "--parsable", *_RESOURCES, *sleep).strip()
    wait_until(
        lambda: slurm.command("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING\n",
        "the allocation",
    )
    yield job
    slurm.cancel_all()


@contextlib.contextmanager
def _kernel(
    place: Place, slurm: SlurmLab
) -> Iterator[tuple[Kernel, Callable[[], Took]]]:
    """Start a kernel, and yield it with a function that runs the cell. Nothing of it is left afterwards."""
    with Kernel(sys.executable, place.folder, place.env) as kernel:
        kernel.run("%load_ext distmagic")
        kernel.run(SOURCE)

        def run() -> Took:
            stamps = place.stamps()
            line = f"%%distributed --on slurm:{slurm.login.name} --ssh-config {slurm.lab.ssh_config} {_FLAGS}"
            ran = kernel.run(f"{line}\nwork({str(stamps.folder)!r})")
            return Took(first_s=stamps.last_at() - ran.began_at, end_s=ran.took_s)

        yield kernel, run
        kernel.run("%distributed down")
    slurm.assert_clean(within_s=30)


def _rows(
    ours: dict[str, list[Took]], theirs: dict[str, list[Took]], note: str
) -> tuple[MetricRow, ...]:
    rows = []
    for title, seconds in (("first user line", _first), ("end of the cell", _end)):
        for what, target in _TARGETS.items():
            rows.append(
                MetricRow(what=f"{title}, Slurm, {what}", unit="s", ours=tuple(map(seconds, ours.get(what, []))),
                    against="srun torchrun by hand", theirs=tuple(map(seconds, theirs.get(what, []))), target=target,
                    note=note)
            )  # fmt: skip
    return tuple(rows)


def _first(took: Took) -> float:
    return took.first_s


def _end(took: Took) -> float:
    return took.end_s
