"""Run a command ROUNDS times beside busy processes: `python -m tests.tiers.stress ROUNDS COMMAND...`.

Each round's last line is printed. The exit code is 1 if any round failed; the output of each is in build/stress.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests import REPOSITORY

BUSY = 8
LOGS = REPOSITORY / "build" / "stress"


def run(command: list[str], log: Path) -> int:
    """Run the command beside busy processes, which end with it, and return its exit code."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(BUSY)
    ]
    try:
        with log.open("w") as output:
            return subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                cwd=REPOSITORY,
            ).returncode
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main(rounds: int, command: list[str]) -> int:
    """Run all rounds, a line each, and return 0 if none failed."""
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for number in range(1, rounds + 1):
        log = LOGS / f"{number}.log"
        began = time.monotonic()
        code = run(command, log)
        failed += code != 0
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        minutes = (time.monotonic() - began) / 60
        print(
            f"round {number}: exit code {code}, {minutes:.1f} min: {last}", flush=True
        )
    print(f"{rounds - failed} of {rounds} rounds are green; output: {LOGS}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
