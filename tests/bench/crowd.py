"""Section crowd: a notebook that follows 1,024 ranks, each of which reports ten times a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from tests.bench import crowd_feeder, crowd_notebook, crowd_page
from tests.bench.bench import REPOSITORY, Bench
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import scratch
from tests.bench.kernels import Kernel
from tests.lab import wait_until
from tests.system.components import reason_without

TITLE = "Following 1,024 ranks at 10 Hz"
_NODES = 128
_SECONDS, _SETTLING_S = 35.0, 10.0
_HOUR_NODES = 4  # an hour of all ranks takes too long; what a few keep is bounded by the same number of points
_TICKS = os.sysconf("SC_CLK_TCK")


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Let simulated agents talk to a real kernel by the real protocol, over unix sockets in place of SSH."""
    cpu, grown, messages, kilobytes = [], [], [], []
    for number in range(min(3, bench.rounds_dear)):
        with scratch("crowd") as folder:
            percent, megabytes = _follow(folder)
            sent = (folder / crowd_notebook.SENT).read_text().split()
        messages.append(float(sent[0]) / float(sent[2]))
        kilobytes.append(float(sent[1]) / float(sent[2]) / 1e3)
        bench.say(
            f"crowd: round {number + 1}: {percent:.1f} % of a core, memory grew by {megabytes:.1f} MB"
        )
        cpu.append(percent)
        grown.append(megabytes)
    bench.say("crowd: an hour's events, as fast as it goes")
    memory = _hour()
    bench.say("crowd: frames of a page that shows it")
    frames = () if reason_without("browser") else (crowd_page.slow_frame_ms(),)
    note = f"peak memory after 10, 20 ... 60 minutes' events of {_HOUR_NODES * crowd_feeder.RANKS_A_NODE} ranks: "
    return (
        MetricRow(
            what="kernel's CPU, 1,024 ranks at 10 Hz", unit="% of a core", ours=tuple(cpu),
            target=Target(limit=15, of="ours"),
            note="a real kernel with its live view; simulated agents at unix sockets, so without what SSH costs",
        ),
        MetricRow(
            what="messages of the live view to its page", unit="a second", ours=tuple(messages),
            target=Target(limit=10, of="ours"),
        ),
        MetricRow(
            what="bytes of the live view to its page", unit="kB a second", ours=tuple(kilobytes),
            target=Target(limit=100, of="ours"),
        ),
        MetricRow(
            what="time between two frames of that page, 95th percentile", unit="ms", ours=frames,
            target=Target(limit=50, of="ours"), note="Chromium without a GPU, fed as fast as a kernel would",
        ),
        MetricRow(
            what=f"kernel's memory, growth from second {_SETTLING_S:g} to {_SECONDS - 5:g}", unit="MB",
            ours=tuple(grown),
        ),
        MetricRow(
            what="growth of memory from the 10th to the 60th minute", unit="%",
            ours=(100 * (memory[-1] - memory[0]) / memory[0],), target=Target(limit=5, of="ours"),
            note=note + ", ".join(f"{each:.0f}" for each in memory) + " MB",
        ),
    )  # fmt: skip


def _follow(folder: Path) -> tuple[float, float]:
    """Return the kernel's CPU in per cent of a core, and by how many MB it grew, once it has settled."""
    path = folder / "s"
    env = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    feeder = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.crowd_feeder", str(path), str(_NODES), str(_SECONDS)], env=env,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until(path.exists, "the simulated agents", timeout_s=120)
        with Kernel(sys.executable, folder, env) as kernel:
            kernel.run(
                "%load_ext distmagic\nfrom pathlib import Path\nfrom tests.bench.crowd_notebook import follow"
            )
            probe = _Probe(kernel.pid, folder / crowd_notebook.BEGUN)
            probe.start()
            shown = kernel.run(f"follow(Path({str(path)!r}), {_NODES})").shown
            probe.join()
        assert "'done'" in shown, shown[-500:]
        late_s = float(feeder.communicate(timeout=30)[0])
        assert late_s < 2, (
            f"the simulated agents were {late_s:.1f} s late: this machine is too busy"
        )
        return probe.percent, probe.grown_mb
    finally:
        feeder.kill()
        feeder.wait()


class _Probe(threading.Thread):
    """Looks at a process from outside, twice."""

    def __init__(self, pid: int, begun: Path) -> None:
        super().__init__()
        self._pid, self._begun = pid, begun
        self.percent = self.grown_mb = 0.0

    def run(self) -> None:
        """Measure between the moment when it has settled and shortly before the end."""
        wait_until(self._begun.exists, "the notebook to follow", timeout_s=60)
        pause = threading.Event()
        pause.wait(_SETTLING_S)
        cpu, memory = self._look()
        span_s = _SECONDS - 5 - _SETTLING_S
        pause.wait(span_s)
        cpu_after, memory_after = self._look()
        self.percent = 100 * (cpu_after - cpu) / span_s
        self.grown_mb = memory_after - memory

    def _look(self) -> tuple[float, float]:
        """Return seconds of CPU, and MB of memory."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{self._pid}/status").read_text()
        resident = next(
            line for line in status.splitlines() if line.startswith("VmRSS")
        )
        return (int(fields[11]) + int(fields[12])) / _TICKS, int(
            resident.split()[1]
        ) / 1024


def _hour() -> list[float]:
    program = f"import json; from tests.bench import crowd_notebook as c; print(json.dumps(c.memory_of_an_hour({_HOUR_NODES})))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[float] = json.loads(done.stdout)
    return found
