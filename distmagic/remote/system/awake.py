"""A rank's answer whether its main thread runs Python: where it waits in C, a request to end by itself is in vain.

a rank   --answer-->           a handler, which Python calls between two of the main thread's steps
agent    --SIGNAL-->           the handler makes a file, beside the agent's sockets
agent    --has_answered-->     whether the file is there
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

# As in stacks.py: used by no library that is known.
SIGNAL = signal.SIGRTMAX - 4


def answer(run_dir: Path) -> None:
    """Have this process answer `SIGNAL`, and take an interrupt as Python does, though its parent may ignore them."""
    file = _file_of(run_dir, os.getpid())

    def make(*_: object) -> None:
        with contextlib.suppress(OSError):
            file.touch(0o600)

    signal.signal(SIGNAL, make)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def has_answered(run_dir: Path, pid: int) -> bool:
    """Whether that process has answered."""
    return _file_of(run_dir, pid).exists()


def _file_of(run_dir: Path, pid: int) -> Path:
    return run_dir / f"awake-{pid}"
