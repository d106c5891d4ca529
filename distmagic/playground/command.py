"""One command on a playground host: a process on plain pipes, as sshd runs it where no terminal is asked for."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031  # fcntl(2), Linux


class Command:
    """A running process with a session of its own. Raises OSError where it can't be started.

    `stdin`, `stdout` and `stderr` are our ends of its pipes; `status` is its exit code, or minus the number of the
    signal that ended it.
    """

    def __init__(self, argv: list[str], env: Mapping[str, str], cwd: Path) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            argv,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=env,
            cwd=cwd,
            start_new_session=True,
            bufsize=0,
        )
        self.stdin = _widened(self._process.stdin)
        self.stdout = _widened(self._process.stdout)
        self.stderr = _widened(self._process.stderr)
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        """Its process id, and that of its session and process group."""
        return self._process.pid

    def signal(self, name: str) -> None:
        """Send a signal, named without its SIG, to the process and its group."""
        number = getattr(signal, f"SIG{name}", None)
        # Until `reaped` its pid is not given to another process.
        if number is not None and not self.status.done():
            os.killpg(self.pid, number)

    def reaped(self, status: int) -> None:
        """Take note that the process has ended, with a status for waitpid's macros."""
        self._process.returncode = os.waitstatus_to_exitcode(status)
        # It is cancelled like the task that waits for it, where its connection has ended.
        if not self.status.cancelled():
            self.status.set_result(self._process.returncode)


def _widened(stream: IO[bytes] | None) -> IO[bytes]:
    """Return a pipe, made as large as the system lets us: fewer turns of the event loop for the same data."""
    assert stream is not None
    if sys.platform == "linux":
        try:
            fcntl.fcntl(stream, _F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            return stream  # over the user's limit: slower, that is all
    return stream


def signal_name(number: int) -> str:
    """Return a signal's name without its SIG, for the client. RFC 4254, 6.10 wants `name@domain` for others."""
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        return f"RT{number}@playground"  # a real-time signal
