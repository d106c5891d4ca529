"""What every section is handed: the folder, and the number of rounds."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "build" / "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One run of the bench. `rounds` is how often each cheap thing is measured, `rounds_dear` each dear one."""

    rounds: int
    rounds_dear: int

    def say(self, text: str) -> None:
        """Tell where it is."""
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
