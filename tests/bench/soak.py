"""Section soak: a thousand runs in one kernel; what it and its hosts hold after the 100th, and after the last."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.bench.bench import REPOSITORY, Bench
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import scratch
from tests.bench.kernels import CellFailed, Kernel
from tests.bench.table import figure
from tests.builders import soak
from tests.lab import Lab, held, wait_until
from tests.lab.held import Held, HeldOnHost

TITLE = "A thousand warm runs in one kernel, 2 hosts"
_RUNS, _SETTLED = 1000, 100
_KEPT = "logs, journals and results, which are kept for 7 days, at most 2 GiB"
_SENT = "each cell has a number, for tracebacks; so its text is sent anew. Kept for 7 days after the last use, at most 2 GiB"
_MIX = "of ten runs one fails, one is interrupted, two return 4 MB each rank; every result is looked at"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the kernel, and all hosts together, hold after a run."""

    kernel: Held
    hosts: HeldOnHost


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Run cells of every kind, and look at kernel and hosts after every hundred runs."""
    with scratch("soak") as folder, Lab(2) as lab:
        looks, seconds = _soak(bench, folder, lab)
        plain_mb = _plain(folder, cells=2 * (_RUNS - _SETTLED))
    kernel, kernel_then = looks[0].kernel, looks[-1].kernel
    hosts, hosts_then = looks[0].hosts, looks[-1].hosts
    times = (_RUNS - _SETTLED) * len(lab.hosts)
    early, late = seconds[: len(seconds) // 10], seconds[-len(seconds) // 10 :]
    return (
        _grown("kernel's descriptors", "", len(kernel.descriptors), len(kernel_then.descriptors), 0),
        _grown("kernel's threads", "", kernel.threads, kernel_then.threads, 0),
        _grown("kernel's temporary files", "", kernel.files, kernel_then.files, 0),
        replace(
            _grown("kernel's memory", "MB", kernel.memory_mb, kernel_then.memory_mb, 10),
            against=f"{2 * (_RUNS - _SETTLED):,} cells without distmagic", theirs=(plain_mb,),
        ),
        _grown("processes on the hosts", "", hosts.processes, hosts_then.processes, 0),
        _grown("their descriptors", "", hosts.descriptors, hosts_then.descriptors, 0),
        _grown("their memory", "MB", hosts.memory_mb, hosts_then.memory_mb, 10),
        _grown("files in /tmp of the hosts", "", hosts.temporary, hosts_then.temporary, 0),
        MetricRow(
            what="directories in ~/.distmagic/jobs, a run and host", unit="",
            ours=((hosts_then.jobs - hosts.jobs) / times,), note=_KEPT,
        ),
        MetricRow(
            what="files in ~/.distmagic/blobs, a run and host", unit="",
            ours=((hosts_then.blobs - hosts.blobs) / times,), note=_SENT,
        ),
        MetricRow(
            what="a warm run with a small result, the last tenth", unit="s", ours=tuple(late),
            against="the first tenth", theirs=(statistics.median(early),), target=Target(limit=1.1), note=_MIX,
        ),
    )  # fmt: skip


def _soak(bench: Bench, folder: Path, lab: Lab) -> tuple[list[Look], list[float]]:
    """Return what was held after every hundred runs, and how long the runs with a small result took."""
    temporary = folder / "tmp"
    temporary.mkdir()
    looks: list[Look] = []
    seconds: list[float] = []
    with Kernel(sys.executable, folder, _environment(folder)) as kernel:
        kernel.run("%load_ext distmagic")
        kernel.run(soak.PREPARE)
        line = f"%%distributed --ssh-config {lab.ssh_config} --hosts dm1:1,dm2:1 -o run"
        for number in range(1, _RUNS + 1):
            run = soak.MIX[number % len(soak.MIX)]
            took_s = _run(kernel, run, line, lab.hosts[0].home / soak.BEGUN)
            if run is soak.SMALL:
                seconds.append(took_s)
            kernel.run(run.look)
            if number % _SETTLED == 0:
                looks.append(
                    Look(kernel=held.of_process(kernel.pid, temporary), hosts=_on(lab))
                )
                bench.say(f"soak: {number} runs: {_in_words(looks[-1])}")
        kernel.run("%distributed down")
    lab.assert_clean(within_s=30)
    return looks, seconds


def _in_words(look: Look) -> str:
    kernel = look.kernel
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(kernel.descriptors).items())
    return (
        f"kernel: {kernel.memory_mb:.1f} MB, {kernel.threads} threads, {kernel.files} files, "
        f"{len(kernel.descriptors)} descriptors ({kinds}); hosts: {look.hosts}"
    )


def _run(kernel: Kernel, run: soak.Run, line: str, begun: Path) -> float:
    """Run a cell, which must end as it should; return the seconds that it took."""
    begun.unlink(missing_ok=True)
    cell = f"{line}\n{run.call}"
    began = time.monotonic()
    if run.ending == "done":
        kernel.run(cell)
    elif run.ending == "failed":
        _expect(kernel, cell, "WorkerFailed")
    else:
        with ThreadPoolExecutor(1) as pool:
            interrupting = pool.submit(_interrupt, kernel.pid, begun)
            _expect(kernel, cell, "Cancelled")
            interrupting.result()
    return time.monotonic() - began


def _interrupt(pid: int, begun: Path) -> None:
    wait_until(begun.exists, "a rank to begin")
    os.kill(pid, signal.SIGINT)


def _expect(kernel: Kernel, cell: str, error: str) -> None:
    try:
        shown = kernel.run(cell).shown
    except CellFailed as failed:
        shown = str(failed)
    if f"{error}: " not in shown:
        raise AssertionError(f"no {error}: {shown}")


def _on(lab: Lab) -> HeldOnHost:
    """Return what is on all hosts together."""
    found = [asdict(held.on_host(host)) for host in lab.hosts]
    return HeldOnHost(**{name: sum(one[name] for one in found) for name in found[0]})


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ, "PYTHONPATH": str(REPOSITORY), "DISTMAGIC_HOME": str(folder / "home"),
        "IPYTHONDIR": str(folder / "ipython"), "TMPDIR": str(folder / "tmp"), "JPY_PARENT_PID": "",
    }  # fmt: skip


def _plain(folder: Path, cells: int) -> float:
    """Return by how many MB a kernel grows that executes so many cells without distmagic."""
    with Kernel(sys.executable, folder, _environment(folder)) as kernel:
        for number in range(_SETTLED):
            kernel.run(f"{number}, 'a cell of some length, as that of a run has'")
        before_mb = held.memory_mb(kernel.pid)
        for number in range(cells):
            kernel.run(f"{number}, 'a cell of some length, as that of a run has'")
        return held.memory_mb(kernel.pid) - before_mb


def _grown(
    what: str, unit: str, before: float, after: float, limit: float
) -> MetricRow:
    """Return the row of something that should not grow; `limit` is by how much it may."""
    note = f"{figure(before)} after run {_SETTLED}, {figure(after)} after run {_RUNS}; {_MIX}"
    return MetricRow(
        what=f"{what}, growth from run {_SETTLED} to {_RUNS:,}", unit=unit, ours=(after - before,),
        target=Target(limit=limit, of="ours"), note=note,
    )  # fmt: skip
