"""Transport to the nodes of a Slurm job: each process is a step of srun, run on a log-in node by
another transport.

The step only runs an usher, which passes its pipes to the node's keeper (remote/keeper); the keeper
starts the process. So children of the process that must outlive it do not end with the step.
"""

from __future__ import annotations

from collections.abc import Callable

from distmagic.errors import ConnectionLost, DistmagicError
from distmagic.remote.frozen import frozen
from distmagic.systems.slurm import srun_words
from distmagic.systems.slurm.shell import Shell
from distmagic.transports import Argv, Process, Transport, program_text
from distmagic.transports.piped import OpenProcesses

Explain = Callable[[DistmagicError], DistmagicError]
PATIENCE_S = 20.0  # time for a keeper that is about to start


@frozen
class Node:
    """One node of a job. `python` runs the usher; `mark` identifies the srun processes of this
    notebook.
    """

    name: str
    job: str
    python: str = "python3"
    mark: str = ""


class SrunProcess:
    """A process on a node, used through its srun, `step`.

    If there was no step, reading raises the reason.

    `explain` returns the error to raise for one that srun has reported.
    """

    def __init__(self, step: Process, node: Node, explain: Explain) -> None:
        self._step, self._node, self._explain = step, node, explain
        self._has_spoken = False
        self.is_closed = False

    def write(self, data: bytes) -> None:
        """Send all of `data` to its stdin. Raises `ConnectionLost` if the other end is gone."""
        try:
            self._step.write(data)
        except ConnectionLost:
            if self._has_spoken or self.is_closed or self._trouble() is None:
                raise
            # There was no step. The first read raises the reason.

    def read(self, max_bytes: int = 65536) -> bytes:
        """Return some bytes of its stdout; b"" at end of file.

        Raises the reason if there was no step.
        """
        data = self._step.read(max_bytes)
        self._has_spoken = self._has_spoken or bool(data)
        if not self._has_spoken and not self.is_closed:
            trouble = self._trouble()
            if trouble is not None:
                raise self._explain(trouble)
        return data

    def _trouble(self) -> DistmagicError | None:
        """Return the error if srun itself has failed."""
        if not self._step.wait(_END_S):
            return None  # it succeeded, or the result is unknown
        return srun_words.trouble(self._node.name, self._node.job, self._step.stderr())

    def stderr(self) -> str:
        """Return its stderr so far, without srun's own lines about its end."""
        return srun_words.own_words(self._step.stderr())

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return its exit code, negative for a signal; None if still running or unknown."""
        code = self._step.wait(timeout_s)
        if code is not None and _FIRST_SIGNAL < code < _FIRST_SIGNAL + 65:
            return _FIRST_SIGNAL - code
        return code

    def close_stdin(self) -> None:
        """Close the process's stdin."""
        self._step.close_stdin()

    def close(self) -> None:
        """Close the pipes."""
        self.is_closed = True
        self._step.close()


_END_S = 5.0  # between a step's end of file and the end of its srun
_FIRST_SIGNAL = 128  # a shell's code for signal N is this and N; srun's too


class SrunTransport(OpenProcesses):
    """Starts processes on one node; `login` starts srun.

    `close` leaves the shared connection of `login` open.
    """

    def __init__(
        self,
        login: Shell | Transport,
        node: Node,
        explain: Explain = lambda error: error,
    ) -> None:
        super().__init__()
        self.node = node
        self._login, self._explain = login, explain

    def start(self, argv: Argv) -> SrunProcess:
        """Start `argv` on the node.

        Raises the errors of `login`; the process's `read` raises errors of srun.
        """
        if not argv:
            raise ValueError("a command needs a program")
        process = self._started({"argv": argv})
        self._add(process)
        return process

    def hold(self) -> SrunProcess:
        """Open the pipe of the lead's lease: the keeper sends "ready"; each byte renews it, "e"
        ends the allocation.
        """
        return self._started({"lease": True})

    def _started(self, what: dict[str, object]) -> SrunProcess:
        node = self.node
        request = {
            "job": node.job,
            "mark": node.mark,
            "patience_s": PATIENCE_S,
            **what,
        }
        usher = program_text.command(node.python, "usher", request)
        step = srun_words.step(node.job, node.name, usher)
        return SrunProcess(self._login.start(step), node, self._explain)
