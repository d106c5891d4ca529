"""A host whose clock is wrong, for every process that a log-in starts: in Python, in torch and in libc."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

from tests.lab.host import LabHost
from tests.system.components import COMPONENTS

_LIBRARY = ".clock.so"
_AHEAD = ".clock-ahead"


def give_clock(host: LabHost, ahead_s: int = 0) -> None:
    """Give a host a clock that `set_clock` sets, from the next log-in on."""
    (host.home / _LIBRARY).write_bytes(library())
    (host.home / ".bashrc").write_text(
        f"export LD_PRELOAD=$HOME/{_LIBRARY} CLOCK_AHEAD=$HOME/{_AHEAD}\n"
    )
    set_clock(host, ahead_s)


def set_clock(host: LabHost, ahead_s: int) -> None:
    """Set its clock so far ahead of this machine's; less than 0: behind."""
    (host.home / _AHEAD).write_text(str(ahead_s))


def library() -> bytes:
    """Return what LD_PRELOAD takes; the file that CLOCK_AHEAD names has the seconds."""
    return compiled(Path(__file__).with_suffix(".c"))


@functools.cache
def compiled(source: Path) -> bytes:
    """Return the shared library of a source in C."""
    compiler = COMPONENTS["cc"].path()
    assert compiler is not None
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "library.so")
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", made, source, "-ldl"]
        subprocess.run(command, check=True)
        return made.read_bytes()
