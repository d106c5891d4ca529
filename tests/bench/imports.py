"""Section imports: what a rank that starts warm spends on the imports of a run before it."""

from __future__ import annotations

import subprocess

from tests.bench import contestants
from tests.bench.bench import Bench
from tests.bench.contestants import Place
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import scratch
from tests.lab import Lab
from tests.system.packages import folder_of

TITLE = "Imports of a rank that starts warm"
_PACKAGES = ("lightning", "transformers")
# Meanwhile the warm processes try the package, and import it.
_PREPARED = "import time; time.sleep(30)"
_TIMED = """
import time

def imported():
    began = time.perf_counter()
    import {package}
    return time.perf_counter() - began
"""


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Import each package in ranks, after a run whose text imports it, and in a Python over ssh."""
    rows = []
    for package in _PACKAGES:
        source = _TIMED.format(package=package)
        with scratch("imports") as folder, Lab(1) as lab:
            place = Place(lab=lab, folder=folder)
            program = f"{source}\nimport torch\nprint(imported())"
            theirs = [
                _by_hand(place, package, program) for _ in range(bench.rounds_dear + 1)
            ]
            with contestants.own_kernel(place) as (kernel, _):
                kernel.run(source)
                line = f"%%distributed --ssh-config {lab.ssh_config} --hosts dm1:1 --env PYTHONPATH={folder_of(package)} -o run"
                kernel.run(f"{line}\nimported()")
                kernel.run(_PREPARED)
                ours = []
                for number in range(bench.rounds_dear):
                    kernel.run(f"{line}\nimported()")
                    ours.append(float(kernel.run("print(run.results[0])").shown))
                    bench.say(
                        f"imports: {package}: {ours[-1]:.3f} s, by hand {theirs[number + 1]:.2f} s"
                    )
            rows.append(
                MetricRow(what=f"import {package} in a rank that starts warm, after a run that used it", unit="s",
                    ours=tuple(ours), against="a new Python over ssh", theirs=tuple(theirs[1:]), target=Target(limit=0.15))
            )  # fmt: skip
    return tuple(rows)


def _by_hand(place: Place, package: str, program: str) -> float:
    host, path = place.lab.hosts[0], f"PYTHONPATH={folder_of(package)}"
    done = subprocess.run(
        ["ssh", "-F", str(place.lab.ssh_config), host.name, path, "python3", "-"],
        input=program, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout.split()[-1])
