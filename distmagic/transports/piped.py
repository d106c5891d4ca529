"""A child process of this machine with the `Process` interface: three pipes, on which no thread can
block forever.
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
from contextlib import suppress
from typing import IO

from distmagic.errors import ConnectionLost
from distmagic.remote.system import threads
from distmagic.transports import Argv, Process

STDERR_KEPT_BYTES = 8192
_PIECE_BYTES = 65536


class Tail:
    """The last bytes of a stream; one thread appends, and any reads."""

    def __init__(self) -> None:
        self._data = b""

    def append(self, data: bytes) -> None:
        """Add `data`, dropping the oldest."""
        self._data = (self._data + data)[-STDERR_KEPT_BYTES:]

    def text(self) -> str:
        """Return the kept text."""
        return self._data.decode(errors="replace")


class PipedProcess:
    """A child in its own session, whose stdin, stdout and stderr are pipes.

    `name` is the host, for messages.
    """

    def __init__(self, argv: Argv, name: str) -> None:
        """Raises OSError if `argv` can't be started."""
        pipe = subprocess.PIPE
        child = subprocess.Popen(
            argv,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        self.name = name
        self.pid = child.pid
        self._child = child
        self._stdin = child.stdin
        self._stdout = child.stdout
        self._stderr = child.stderr
        self._tail = Tail()
        self._ended = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._closing = threading.Lock()
        self.is_closed = False
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._drainer = threads.begin(f"stderr-{self.pid}", self._drain)
        threads.begin(f"wait-{self.pid}", self._reap)

    def _drain(self) -> None:
        with self._stderr:
            while data := os.read(self._stderr.fileno(), 4096):
                self._tail.append(data)

    def _reap(self) -> None:
        self._child.wait()
        self._ended.set()

    def write(self, data: bytes) -> None:
        """Send all of `data`. Raises `ConnectionLost` if the other end is gone."""
        view = memoryview(data)
        with self._writing:
            try:
                while view:
                    self._wait_for(self._stdin.fileno(), select.POLLOUT)
                    with suppress(BlockingIOError):
                        view = view[
                            os.write(self._stdin.fileno(), view[:_PIECE_BYTES]) :
                        ]
            except (OSError, ValueError):
                raise ConnectionLost(
                    f"{self.name}: the process no longer takes input."
                ) from None

    def read(self, max_bytes: int = 65536) -> bytes:
        """Return bytes as soon as there are any; b"" at end of file or after `close`."""
        with self._reading:
            while True:
                try:
                    self._wait_for(self._stdout.fileno(), select.POLLIN)
                    return os.read(self._stdout.fileno(), max_bytes)
                except BlockingIOError:
                    continue
                except (OSError, ValueError):  # closed
                    return b""

    def _wait_for(self, descriptor: int, event: int) -> None:
        """Wait until `descriptor` is ready. Raises ValueError once this process is closed."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(descriptor, event)
        if self.is_closed or any(ready == self._wake_read for ready, _ in poll.poll()):
            raise ValueError("closed")

    def stderr(self) -> str:
        """Return the end of its stderr; all of it once it has ended."""
        if self._ended.is_set():
            self._drainer.join(0.2)
        return self._tail.text()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return its exit code, negative for a signal; None if still running after `timeout_s`."""
        return self._child.returncode if self._ended.wait(timeout_s) else None

    def close_stdin(self) -> None:
        """Close the process's stdin, after the bytes that are being written."""
        with self._writing:
            self._close_file(self._stdin)

    def close(self) -> None:
        """Close the pipes; a blocked read or write returns. The process itself may run on."""
        with self._closing:
            if self.is_closed:
                return
            self.is_closed = True
            os.write(self._wake_write, b"x")
            with self._writing, self._reading:
                self._close_file(self._stdin)
                self._close_file(self._stdout)
                os.close(self._wake_read)
                os.close(self._wake_write)

    @staticmethod
    def _close_file(file: IO[bytes]) -> None:
        with suppress(OSError):
            file.close()


class OpenProcesses:
    """The part of a transport that closes its processes. Safe to use from threads."""

    warnings: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._open: list[Process] = []
        self._lock = threading.Lock()

    def _add(self, process: Process) -> None:
        """Add a process, and forget those that were closed meanwhile."""
        with self._lock:
            self._open = [one for one in self._open if not one.is_closed]
            self._open.append(process)

    def close(self) -> None:
        """Close the pipes of all processes; what the transport is made of stays open."""
        with self._lock:
            found, self._open = self._open, []
        for process in found:
            process.close()
