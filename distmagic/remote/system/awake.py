"""Whether a rank's main thread runs Python code: while it is blocked in C code, a request to end
has no effect.

    a rank  --answer-->        a handler, which Python calls between two bytecode instructions of
                               the main thread
    agent   --SIGNAL-->        the handler makes a file, next to the agent's sockets
    agent   --has_answered-->  whether the file exists
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

# As in stacks.py: used by no known library.
SIGNAL = signal.SIGRTMAX - 4


def answer(run_dir: Path) -> None:
    """Make this process answer `SIGNAL`, and handle interrupts as Python does even if its parent
    ignored them.
    """
    file = _file_of(run_dir, os.getpid())

    def make(*_: object) -> None:
        with suppress(OSError):
            file.touch(0o600)

    signal.signal(SIGNAL, make)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def has_answered(run_dir: Path, pid: int) -> bool:
    """Whether that process has answered."""
    return _file_of(run_dir, pid).exists()


def _file_of(run_dir: Path, pid: int) -> Path:
    return run_dir / f"awake-{pid}"
