"""Run SkyPilot for real: `make sky`, or `python -m tests.sky` when build/sky is made. Exit code 1 if anything is wrong."""

from __future__ import annotations

import os
import subprocess
import sys

from tests import REPOSITORY
from tests.lab import isolate
from tests.sky import scenes
from tests.sky.lab import HOME, Clock, sky_lab
from tests.sky.packages import VENV
from tests.system.components import SKY_NEEDS, reason_without

PYTHON = str(VENV / "bin/python")
_OWN_PACKAGE = (
    sys.executable, "-m", "pytest", "--quiet", "-p", "no:xdist", "--durations=0", "-k", "skypilots_own or as_skypilot_writes",
    "tests/unit/systems/skypilot/test_export.py", "tests/unit/systems/skypilot/test_sky_words.py",
)  # fmt: skip


def main() -> int:
    """Run all scenes, and return the exit code."""
    if reason := _reason():
        print(f"SkyPilot can't be run here: {reason}", file=sys.stderr)
        return 1
    clock = Clock()
    env = {**os.environ, "SKYPILOT_PYTHON": PYTHON}
    subprocess.run(_OWN_PACKAGE, cwd=REPOSITORY, env=env, check=True)
    clock.tell("SkyPilot's own package takes every task that is exported")
    isolate()
    os.environ["HOME"] = str(HOME)  # of the notebooks, too
    with sky_lab() as lab:
        clock.tell("Slurm on two nodes")
        said = lab.sky("check", "slurm", "--verbose")
        assert "Slurm" in said.partition("Enabled infra")[2], said
        clock.tell("sky check: Slurm is its cloud")
        for scene in scenes.SCENES:
            scene(lab, clock)
    clock.tell("SkyPilot's server and Slurm have ended")
    return 0


def _reason() -> str:
    if reason := reason_without(*SKY_NEEDS):
        return reason
    if not (VENV / "bin/sky").exists():
        return "build/sky is not made: make sky does that"
    return ""


if __name__ == "__main__":
    sys.exit(main())
