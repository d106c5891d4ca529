"""Section load: `%load_ext distmagic` on top of IPython's own start."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.bench.bench import REPOSITORY, Bench
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import scratch

TITLE = "Loading the extension"
_PROGRAM = """
import json, sys, time
began = time.perf_counter()
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("1")
ready = time.perf_counter()
shell.run_line_magic("load_ext", "distmagic")
loaded = time.perf_counter()
assert "distributed" in shell.magics_manager.magics["cell"]
print(json.dumps([1e3 * (loaded - ready), 1e3 * (ready - began)]))
"""


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Start a fresh process a round; the first one only warms the caches."""
    with scratch("load") as folder:
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "IPYTHONDIR": str(folder)}
        found = [_once(env) for _ in range(bench.rounds + 1)][1:]
    return (
        MetricRow(
            what="%load_ext distmagic", unit="ms", ours=tuple(ours for ours, _ in found),
            against="IPython's own start", theirs=tuple(theirs for _, theirs in found),
            target=Target(limit=100, of="ours"),
        ),
    )  # fmt: skip


def _once(env: dict[str, str]) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    ours, theirs = json.loads(done.stdout.splitlines()[-1])
    return ours, theirs
