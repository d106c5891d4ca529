"""Nodes of a Slurm job: each process is a step of srun, run on a log-in node through another transport.

The step is only an usher: it hands its pipes to the node's keeper (remote/keeper), which starts the process. So what the
process starts, and means to outlive it, does not end with the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from distmagic.transports import Process, Transport, program_text, srun_words
from distmagic.transports.piped import OpenProcesses

PATIENCE_S = 20.0  # for a keeper that is about to begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a job. `cluster` is "" but in a federation; `python` runs the usher."""

    name: str
    job: str
    cluster: str = ""
    python: str = "python3"


class SrunProcess:
    """A process on a node, seen through its srun. Where there was no step, reading and writing raise why."""

    def __init__(self, step: Process, node: Node) -> None:
        self._step, self._node = step, node
        self._has_spoken = self._is_closed = False

    def write(self, data: bytes) -> None:
        """Send all of `data` to its stdin. Raises `ConnectionLost` if the other end is gone."""
        self._step.write(data)

    def read(self, max_bytes: int = 65536) -> bytes:
        """Return some bytes of its stdout; b"" at end of file. Raises why there was no step, if that is so."""
        data = self._step.read(max_bytes)
        if data:
            self._has_spoken = True
        elif not self._has_spoken and not self._is_closed:
            self._check()
        return data

    def _check(self) -> None:
        """Raise an error where srun itself has failed."""
        if not self._step.wait(_END_S):
            return  # it ended well, or how is not known
        trouble = srun_words.trouble(
            self._node.name, self._node.job, self._step.stderr()
        )
        if trouble is not None:
            raise trouble

    def stderr(self) -> str:
        """Return what it has written to stderr so far, without srun's own words on its end."""
        return srun_words.own_words(self._step.stderr())

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return its exit code, negative for a signal; None if still running or unknown."""
        code = self._step.wait(timeout_s)
        if code is not None and _FIRST_SIGNAL < code < _FIRST_SIGNAL + 65:
            return _FIRST_SIGNAL - code
        return code

    def close_stdin(self) -> None:
        """Give it end of file on stdin."""
        self._step.close_stdin()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def close(self) -> None:
        """Let go of the pipes."""
        self._is_closed = True
        self._step.close()


_END_S = 5.0  # between a step's end of file and the end of its srun
_FIRST_SIGNAL = 128  # a shell's code for signal N is this and N; srun's too


class SrunTransport:
    """Starts processes on one node; `login` starts srun."""

    def __init__(self, login: Transport, node: Node) -> None:
        self.warnings: tuple[str, ...] = ()
        self.node = node
        self._login = login
        self._processes = OpenProcesses()

    def start(self, argv: tuple[str, ...]) -> SrunProcess:
        """Start `argv` there. Raises what `login` raises; what srun says is raised by the process's `read`."""
        if not argv:
            raise ValueError("a command needs a program")
        process = SrunProcess(self._start({"argv": argv}), self.node)
        self._processes.add(process)
        return process

    def hold(self) -> SrunProcess:
        """Open the lead's lease: the keeper says "ready"; each byte renews it, and an "e" ends the allocation."""
        return SrunProcess(self._start({"lease": True}), self.node)

    def _start(self, what: dict[str, object]) -> Process:
        node = self.node
        request = {"job": node.job, "patience_s": PATIENCE_S, **what}
        usher = program_text.command(node.python, "usher", request)
        return self._login.start(
            srun_words.step(node.job, node.cluster, node.name, usher)
        )

    def close(self) -> None:
        """Let go of all pipes. The log-in node's connection is others' too, and stays."""
        self._processes.close()
