"""One command on a playground host, run as sshd runs it: on plain pipes, joined to an SSH channel.

In both directions data moves no faster than the slower side takes it. A closed channel gives the command end of file
and SIGPIPE and nothing else. Runs in the server's event loop; nothing here blocks.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

STDERR = 1  # RFC 4254, 5.2: SSH_EXTENDED_DATA_STDERR
_CHUNK_BYTES = 1 << 18
_HELD_BYTES = 1 << 20  # of stdin, before the client is told to wait
_F_SETPIPE_SZ = 1031  # fcntl(2), Linux


class CommandChannel(Protocol):
    """What a command needs of an SSH channel, by asyncssh's names."""

    def write(self, data: bytes, datatype: int | None = None) -> None:
        """Send output; `datatype` is `STDERR` or None."""

    def pause_reading(self) -> None:
        """Take no more input from the client."""

    def resume_reading(self) -> None:
        """Take input again."""

    def exit(self, status: int) -> None:
        """Tell the exit code and close."""

    def exit_with_signal(self, signal: str) -> None:
        """Tell the signal, without its SIG, and close."""

    def is_closing(self) -> bool:
        """Whether nothing can be sent any more."""


class Command:
    """A running process. Raises OSError where it can't be started."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: Path, channel: CommandChannel) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=cwd, start_new_session=True, bufsize=0
        )
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._held = bytearray()
        self._input_ends = False
        self._status: int | None = None
        self._input, output, error = _detach(self._process)
        self._outputs: dict[int, int | None] = {output: None, error: STDERR}
        self.resume()

    @property
    def pid(self) -> int:
        """Its process id, and that of its session and process group."""
        return self._process.pid

    # ---- told by the channel

    def receive(self, data: bytes) -> None:
        """Take input from the client."""
        self._held += data
        self._write()
        if len(self._held) > _HELD_BYTES:
            self._channel.pause_reading()

    def receive_eof(self) -> None:
        """Give the process end of file after all input so far."""
        self._input_ends = True
        self._write()

    def signal(self, name: str) -> None:
        """Send a signal, named without its SIG, to the process and its group."""
        number = getattr(signal, f"SIG{name}", None)
        if number is not None and self._status is None:  # until `reaped` its number is not given out again
            os.killpg(self.pid, number)

    def pause(self) -> None:
        """Take no more output from the process."""
        for fd in self._outputs:
            self._loop.remove_reader(fd)

    def resume(self) -> None:
        """Take output again."""
        for fd in self._outputs:
            self._loop.add_reader(fd, self._read, fd)

    def let_go(self) -> None:
        """Close all pipes: the channel is gone."""
        self._close_input()
        for fd in list(self._outputs):
            self._close_output(fd)

    # ---- told by the system

    def reaped(self, status: int) -> None:
        """Take note that the process has ended, with a status for waitpid's macros."""
        self._status = self._process.returncode = os.waitstatus_to_exitcode(status)
        self._finish()

    def _read(self, fd: int) -> None:
        data = os.read(fd, _CHUNK_BYTES)
        if data and not self._channel.is_closing():
            self._channel.write(data, self._outputs[fd])
        else:
            self._close_output(fd)
            self._finish()

    def _write(self) -> None:
        try:
            while self._held and self._input >= 0:
                del self._held[: os.write(self._input, memoryview(self._held)[:_CHUNK_BYTES])]
        except BlockingIOError:
            self._loop.add_writer(self._input, self._write)
            return
        except BrokenPipeError:
            self._input_ends = True  # nobody reads: as sshd, take and drop what the client still sends
        self._held.clear()
        if self._input_ends:
            self._close_input()
        elif self._input >= 0:
            self._loop.remove_writer(self._input)
        self._channel.resume_reading()

    def _finish(self) -> None:
        """As sshd, wait for the end of the process and of its output, which its children may hold open."""
        if self._status is None or self._outputs or self._channel.is_closing():
            return
        if self._status >= 0:
            self._channel.exit(self._status)
        else:
            self._channel.exit_with_signal(_name(-self._status))

    def _close_input(self) -> None:
        if self._input >= 0:
            self._loop.remove_writer(self._input)
            os.close(self._input)
            self._input = -1

    def _close_output(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        os.close(fd)
        del self._outputs[fd]


def _detach(process: subprocess.Popen[bytes]) -> tuple[int, int, int]:
    """Return our ends of the pipes of stdin, stdout and stderr, non-blocking and large, and ours to close."""
    fds = []
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream is not None
        fds.append(os.dup(stream.fileno()))
        stream.close()
        os.set_blocking(fds[-1], False)
        _widen(fds[-1])
    return fds[0], fds[1], fds[2]


def _widen(fd: int) -> None:
    if sys.platform == "linux":
        try:
            fcntl.fcntl(fd, _F_SETPIPE_SZ, _HELD_BYTES)
        except OSError:
            return  # over the user's limit: slower, that is all


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        return f"RT{number}@playground"  # a real-time signal; RFC 4254, 6.10 wants a name of that form
